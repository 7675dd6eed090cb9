"""The metrics that a run shows: as charts in TensorBoard, and as rows of the tables at its end.

One list for all of them. docs/metrics.md explains these metrics and the ones that metrics.jsonl has
besides.
"""

from dataclasses import dataclass

from bubblespec.config_combinations import EVAL_NAMES

OWN_GROUP = "z_bubblespec"  # TensorBoard sorts groups by name: after reward, train and all others
# Beginnings of the keys that only this trainer has.
OWN = ("rollout/", "bubble/", "drafts/", "quantized/", "drafter/", "idle/", "guard/", "tail/")
OWN += ("tp_tail/",)
CONSTANT = ("data/num_dropped",)  # the same in all steps: not drawn


@dataclass(frozen=True)
class Metric:
    """A metric that is shown; a regular expression stands for several."""

    key: str
    chart: str
    """Title of its chart, which other metrics may share."""
    row: str = ""
    """Name of its row at the end of a run; empty: none."""


# By the question that they answer, which is the title of a group of charts.
SHOWN = {
    "Watch first": (
        Metric("eval/reward", "Held-out reward", "held-out reward"),
        Metric("reward", "Reward", "reward"),
        Metric(
            "frac_reward_zero_std", "Share of groups with equal rewards", "groups of equal rewards"
        ),
        Metric("completions/mean_length", "Response tokens", "tokens per response"),
        Metric("completions/mean_terminated_length", "Response tokens"),
        Metric("completions/clipped_ratio", "Share of responses cut off", "cut off at the limit"),
        Metric("entropy", "Entropy", "entropy"),
        Metric("grad_norm", "Gradient norm"),
        Metric("timing_s/step", "Seconds per step", "seconds per step"),
        Metric("timing_s/gen", "Seconds per step", "  generating"),
        Metric("timing_s/bubble", "Seconds per step", "  waiting for other ranks"),
        Metric("timing_s/reward", "Seconds per step", "  waiting for rewards"),
        Metric("timing_s/train", "Seconds per step", "  training"),
    ),
    "Is it learning?": (
        Metric("rewards/.*/mean", "Rewards by function"),
        Metric("eval/rewards/.*/mean", "Held-out rewards by function"),
        Metric("eval/pass@.*", "Held-out pass@k"),
        Metric(f"eval/(?!({'|'.join(EVAL_NAMES)})$|pass@)[^/]*", "Held-out scores"),
        Metric("reward_std", "Spread of rewards"),
        Metric("rewards/.*/std", "Spread of rewards"),
        Metric("critic/rewards/.*", "Range of rewards"),
    ),
    "What is generated?": (
        Metric("completions/max_length", "Range of response tokens", "longest response"),
        Metric("completions/(min|mean)_length", "Range of response tokens"),
        Metric(
            "completions/(min|mean|max)_terminated_length", "Range of tokens of finished responses"
        ),
        Metric("prompt_length/.*", "Prompt tokens"),
        Metric("eval/completions/mean_length", "Held-out response tokens", "tokens per response"),
        Metric("eval/completions/clipped_ratio", "Held-out share cut off", "cut off at the limit"),
        Metric("reward/errors", "Rewards that failed"),
        Metric("eval/reward/errors", "Rewards that failed", "rewards that failed"),
        Metric("tools/.*", "Tool calls"),
        Metric("episodes/turns", "Turns per episode"),
    ),
    "Is the update sound?": (
        Metric("loss", "Loss"),
        Metric("kl", "KL to the initial policy"),
        Metric("divergence", "Divergence from the teacher", "divergence from the teacher"),
        Metric("clip_ratio/.*", "Share of tokens clipped"),
        Metric("critic/advantages/.*", "Range of advantages"),
        Metric("sampling/logp_difference/.*", "Generation against training, log-probabilities"),
        Metric("learning_rate", "Learning rate"),
        Metric("skipped_updates", "Skipped updates"),
    ),
    "Where does the time go?": (
        Metric("timing_s/(gen|bubble|reward|train|sync|exchange)", "Seconds by phase"),
        Metric("timing_s/gen/rank_.*", "Seconds of generation by rank"),
        Metric("timing_s/eval", "Seconds of an evaluation", "seconds"),
        Metric("perf/throughput", "Tokens per second and rank", "tokens per second and rank"),
        Metric("perf/mfu", "Model FLOPs utilisation"),
        Metric("perf/max_memory_gb", "Memory in GB"),
    ),
    "What do drafts bring?": (
        Metric(
            "rollout/spec_accept_rate", "Share of draft tokens accepted", "draft tokens accepted"
        ),
        Metric("drafts/[a-z_]*/accept_rate", "The same by source"),
        Metric("rollout/spec_accept_length", "Tokens per row and forward"),
        Metric("rollout/forwards", "Forwards"),
        Metric("idle/.*/saved_s", "Seconds saved by uses of idle time"),
    ),
}


def tag_of(key: str) -> str:
    """Return the curve of a metric.

    A key without a group is in `train`, as in TRL; what only this trainer has, seconds by rank
    included, is in one group of its own."""
    if "/" not in key:
        return f"train/{key}"
    return f"{OWN_GROUP}/{key}" if key.startswith(OWN) or "/rank_" in key else key


def rows(of_evaluations: bool) -> list[Metric]:
    """Return the metrics that have a row at the end of a run, of steps or of evaluations."""
    metrics = [metric for metrics in SHOWN.values() for metric in metrics if metric.row]
    return [m for m in metrics if m.key.startswith(("eval/", "timing_s/eval")) == of_evaluations]
