"""Draws pictures of docs/images: python -m notebooks.images [NAME ...]

By default all that need no training run: from the simulator (step_eight_ranks takes several
minutes), from the estimate of memory, from the tiny policy, and from what benchmarks and runs have
recorded.
"""

import os
import sys

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from benchmarks import simulated_systems
from benchmarks.simulated_systems import (
    GENERATIONS,
    MISMATCH,
    PROMPT,
    RANKS,
    SHARE_OF_LONGEST,
    K,
    scaled_costs,
    shortened,
)
from bubblespec import memory
from bubblespec.config.file import load_config
from bubblespec.telemetry.timeline import KINDS
from bubblespec.tools.memory import CARDS, needs_of, planned_model
from bubblespec.tools.simulate.command import synthetic_run
from bubblespec.tools.simulate.roofline import GPUS, MODELS
from bubblespec.tools.simulate.run import SimulatedStep, simulate
from bubblespec.tools.simulate.workload import Spec
from bubblespec.types import Group
from notebooks import experiments
from notebooks.pictures import SIZE, draw_timelines, figure_of, label_axes, legend_below
from notebooks.reports import SIMULATED_KEYS, read_report

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, "docs", "images")
SIMULATED = os.path.join(ROOT, "docs", "lab", "simulated_systems.json")

COST = "h200:7b"
LONGEST = 16 * K  # tokens of the responses of the simulated step
SCALE = 32  # real tokens for each simulated one, to have fewer forwards
PROMPTS = 64  # of a step
STEPS = 30  # one from the middle is drawn: the first has no drafts, and the last drafts nothing
# Operations per parameter and token: forward, backward, and a forward to recompute activations.
TRAINING_OPERATIONS = 2 + 4 + 2
TRAINING_SHARE = 0.5  # of peak operations

# For a reader who sees these words for the first time.
EXPLAINED = {
    "prefill": "prefill (read the prompts)",
    "verify drafts": "verify drafts of earlier steps",
    "draft (co-scheduled)": "generate or verify, and draft",
    "draft (idle)": "draft coming steps (idle)",
    "TP tail": "the last rows, computed by all ranks together (TP tail)",
    "idle": "idle (wait for others)",
}

PARTS = {
    "weights": "#08519c",
    "gradients": "#7b52ab",
    "optimizer state (this rank's share)": "#c9a9e8",
    "quantised copy for drafts": "#8c9bb5",
    "one forward (logits, activations)": "#e78ac3",
    "keys and values": "#1b9e77",
    "one gradient step (activations, logits)": "#e3701a",
    "free": "#efefef",
}

WINDOW, NUM_RIGHT = 6, 4  # tokens of the draft that is drawn, and those before its first mismatch
ACCEPTED, WRONG, DROPPED = "#1b9e77", "#d62728", "#bbbbbb"


def step_eight_ranks() -> Figure:
    """Draw a step of a 7B on eight GPUs, without drafts and with the default configuration."""
    spec = Spec(
        mean=LONGEST / SHARE_OF_LONGEST, max=LONGEST, prompt=PROMPT, run=MISMATCH, steps=STEPS
    )
    costs = scaled_costs(COST, RANKS, SCALE)
    sizes = [f"rollout.num_prompts_per_step={PROMPTS}", f"rollout.num_generations={GENERATIONS}"]
    plain = ["speculative.method=none", "rollout.placement=in_turn", "rollout.tp_tail_max_rows=0"]
    of_method = []
    for overrides in (plain, []):
        config, workload = synthetic_run(shortened(spec, SCALE), sizes + overrides)
        of_method.append(simulate(config, workload, num_ranks=RANKS, **costs, shows_progress=True))
    totals_s = np.array(
        [[SCALE * step.seconds + train_s(step) for step in steps] for steps in of_method]
    )
    before_s, after_s = totals_s
    overall = before_s.sum() / after_s.sum()
    middle = slice(STEPS // 3, 2 * STEPS // 3)
    number = middle.start + int(np.argmin(np.abs((before_s / after_s)[middle] - overall)))
    words = ("without drafts", "default configuration")
    titles = [f"{word}: {s:.0f} s" for word, s in zip(words, totals_s[:, number], strict=True)]
    titles[1] += f", {before_s[number] / after_s[number]:.2f}x as fast, with the same tokens"
    lanes = {
        title: [with_training(lane, steps[number]) for lane in steps[number].lanes]
        for title, steps in zip(titles, of_method, strict=True)
    }
    figure = draw_timelines(lanes, columns=3)
    for text in figure.legends[0].get_texts():
        text.set_text(EXPLAINED.get(text.get_text(), text.get_text()))
    idle = [f"{idle_share(steps):.0%}" for steps in of_method]
    figure.suptitle(
        f"One training step of a 7B model on {RANKS} GPUs. SIMULATED, not measured:\n"
        f"Qwen2.5-7B in bfloat16 on H200s by a roofline; {PROMPTS} prompts x {GENERATIONS} "
        f"responses, lengths lognormal, mean {LONGEST // SHARE_OF_LONGEST:,} and at most "
        f"{LONGEST:,} tokens;\na fresh draft is right for {MISMATCH} tokens on average; "
        f"training by its operations at {TRAINING_SHARE:.0%} of peak.\nOf {STEPS} steps, the one "
        f"in the middle whose gain is closest to that of all of them, {overall:.2f}x; "
        f"idle in all rollouts: {idle[0]} and {idle[1]}",
        fontsize=SIZE,
    )
    return figure


def idle_share(steps: list[SimulatedStep]) -> float:
    """Return the share of the rollouts in which ranks have nothing to do."""
    seconds = np.array([step.seconds for step in steps])
    return float(seconds @ [step.idle_share for step in steps] / seconds.sum())


def train_s(step: SimulatedStep) -> float:
    """Return the seconds in which each H200 trains a 7B on its share of a step's tokens."""
    tokens = SCALE * step.response_tokens / RANKS
    operations = TRAINING_OPERATIONS * MODELS["7b"].parameters * tokens
    return operations / (TRAINING_SHARE * GPUS["h200"].peak)


def with_training(lane: np.ndarray, step: SimulatedStep) -> np.ndarray:
    """Return a rank's lane, float64 [spans, 3], in real seconds and with the training."""
    begin_s = SCALE * step.seconds
    train = (KINDS.index("train"), begin_s, begin_s + train_s(step))
    return np.vstack((lane * (1.0, SCALE, SCALE), train))


def drafted_tokens() -> Figure:
    """Draw six tokens of a draft by older weights, and the tokens that the policy keeps."""
    setting = experiments.tiny_setting()
    tokenizer = setting.tokenizer
    rows, drafts = (
        experiments.make_rows([Group(prompt, 1) for prompt in setting.prompts], 4, 96)
        for _ in range(2)
    )
    setting.respond(rows)
    setting.respond(drafts, is_older=True)
    pairs = list(zip(rows, drafts, strict=True))
    begins = [first_mismatch(row.tokens, draft.tokens) - NUM_RIGHT for row, draft in pairs]
    begin = max(begins)
    row, draft = pairs[begins.index(begin)]
    said = [tokenizer.decode([token]) for token in draft.tokens[begin : begin + WINDOW].tolist()]
    true = [tokenizer.decode([token]) for token in row.tokens[begin:][: NUM_RIGHT + 1].tolist()]
    text = tokenizer.decode(row.tokens[:begin].tolist())
    return draw_tokens(text, said, true, first=begin)


def first_mismatch(tokens: np.ndarray, draft: np.ndarray) -> int:
    """Its place; 0 where there is none, or the draft ends too soon after it to be drawn."""
    shared = min(len(tokens), len(draft))
    differs = np.flatnonzero(tokens[:shared] != draft[:shared])
    place = int(differs[0]) if len(differs) else 0
    return place if place + WINDOW - NUM_RIGHT <= len(draft) else 0


def draw_tokens(text: str, said: list[str], true: list[str], first: int) -> Figure:
    """text: the response so far; said: the draft; true: what the policy samples up to the first
    mismatch, with it; first: the position of the draft's first token in the response."""
    num_right = len(true) - 1
    figure = Figure(figsize=(11.4, 4.5), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 11.4)
    axes.set_ylim(0, 4.5)
    axes.axis("off")
    left, pitch, width, height = 3.15, 0.96, 0.84, 0.46

    def box(column: int, y: float, token: str, colour: str, is_dropped: bool = False) -> None:
        x = left + pitch * column
        style = {"boxstyle": "round,pad=0.02", "edgecolor": colour, "linewidth": 1.6}
        style |= {"linestyle": ":"} if is_dropped else {}
        shade = "#ffffff" if is_dropped else colour + "22"
        axes.add_patch(FancyBboxPatch((x, y), width, height, facecolor=shade, **style))
        options = {"ha": "center", "va": "center", "color": DROPPED, "fontsize": SIZE}
        if not is_dropped:
            size = 13 if len(token) < 5 else 10
            options |= {"family": "monospace", "color": "#111111", "fontsize": size}
            token = token.replace(" ", "␣")
        axes.text(x + width / 2, y + height / 2, token, **options)

    def heading(y: float, title: str, detail: str) -> None:
        axes.text(0.2, y + 0.4, title, fontsize=12, weight="bold", va="center")
        axes.text(0.2, y + 0.06, detail, fontsize=SIZE, color="#444444", va="center")

    shown = text if len(text) < 30 else "... " + text[-26:]
    axes.text(0.2, 4.2, "Response so far", fontsize=12, weight="bold", va="center")
    axes.text(left, 4.2, shown, fontsize=10, family="monospace", va="center")
    rows = {"noise": 3.4, "draft": 2.45, "verify": 1.45, "keep": 0.35}
    key = "fixed by the key (seed, prompt, visit,\nsample, position)"
    heading(rows["noise"], "Random noise", key)
    heading(rows["draft"], "1  Draft", "older weights, in idle time\nof an earlier step")
    heading(rows["verify"], "2  Verify", "current weights: one forward\nsamples at all positions")
    count = f"{num_right + 1} tokens from one forward:\n{num_right} accepted and 1 replaced"
    heading(rows["keep"], "3  Keep", count)
    for column, token in enumerate(said):
        x = left + pitch * column + width / 2
        noise = {"ha": "center", "va": "center", "fontsize": SIZE, "color": "#6a51a3"}
        axes.text(x, rows["noise"] + 0.25, f"position\n{first + column}", **noise)
        arrow = {"arrowstyle": "->", "color": "#9e9ac8", "linewidth": 1.2}
        ends = (x, rows["draft"] + height + 0.04), (x, rows["noise"] + 0.04)
        axes.annotate("", *ends, arrowprops=arrow)
        box(column, rows["draft"], token, "#e3701a")
        sign = {"ha": "center", "va": "center", "fontsize": 14}
        between = (rows["draft"] + rows["verify"] + height) / 2
        if column > num_right:
            box(column, rows["verify"], "not used", DROPPED, is_dropped=True)
            box(column, rows["keep"], "dropped", DROPPED, is_dropped=True)
            continue
        colour, text = (ACCEPTED, "=") if column < num_right else (WRONG, "≠")
        box(column, rows["verify"], true[column], colour)
        box(column, rows["keep"], true[column], colour)
        axes.text(x, between, text, color=colour, **sign)
    notes = {
        "noise": "the same for 1 and 2",
        "draft": f"{len(said)} tokens",
        "verify": "the first mismatch (red):\nthe current weights\nsample another token",
        "keep": "their token replaces the\ndraft's; what the draft\nsays after it is dropped",
    }
    for name, note in notes.items():
        where = (left + pitch * len(said) + 0.1, rows[name] + height / 2)
        axes.text(*where, note, fontsize=SIZE, color="#444444", va="center")
    return figure


def memory_7b() -> Figure:
    """Draw the memory of one of eight GPUs for configs/qwen2.5_7b.yaml, on two cards."""
    config = load_config(os.path.join(ROOT, "configs", "qwen2.5_7b.yaml"))
    needs = needs_of(config, planned_model(config, config.model.path), RANKS)
    lasting = (needs.weights, needs.gradients, needs.optimizer, sum(needs.others.values()))
    figure, (axes,) = figure_of(11, 3.8)
    names = []
    for card, total in list(CARDS.items())[1:]:  # a 7B does not fit on the smallest
        room = total * config.rollout.gpu_memory_utilization - needs.lasting
        cache = needs.room_for_cache(room, config)
        for moment in ("rollout", "update"):
            parts = dict(zip(PARTS, lasting, strict=False))
            if moment == "rollout":
                parts["one forward (logits, activations)"] = needs.rollout
                parts["keys and values"] = cache
            else:
                parts["one gradient step (activations, logits)"] = needs.training
            parts["free"] = total - sum(parts.values())
            left = 0.0
            for part, size in parts.items():
                style = {"color": PARTS[part], "edgecolor": "#ffffff", "height": 0.72}
                axes.barh(len(names), size / 1e9, left=left / 1e9, **style)
                if size / 1e9 > 4.0:
                    colour = "#ffffff" if part in ("weights", "gradients") else "#111111"
                    middle = (left + size / 2) / 1e9
                    where = {"ha": "center", "va": "center", "fontsize": SIZE, "color": colour}
                    axes.text(middle, len(names), f"{size / 1e9:.1f}", **where)
                left += size
            name = f"{card} card, {moment}"
            if moment == "rollout":
                tokens = cache / needs.slot * memory.max_length(config)
                name += f":\nkeys and values of {tokens / 1000:,.0f}k tokens"
            names.append(name)
    axes.set_yticks(range(len(names)), names, fontsize=SIZE)
    axes.invert_yaxis()
    title = (
        f"Memory of one of {RANKS} ranks: a 7B model, all parameters trained in bfloat16 "
        "(configs/qwen2.5_7b.yaml), estimated"
    )
    label_axes(axes, title, "GB of GPU memory (1 GB = 10^9 bytes)")
    handles = [Patch(facecolor=colour, label=part) for part, colour in PARTS.items()]
    legend_below(figure, 4, handles, list(PARTS))
    return figure


def simulated_systems_figure() -> Figure:
    """The systems, simulated, by the length of the longest response."""
    report = read_report(SIMULATED, SIMULATED_KEYS)
    settings = report["settings"]
    heading = f"{simulated_systems.heading_of(settings)}; a 7B, up to 16k tokens"
    heading += f"\n{simulated_systems.drafts_of(settings)}"
    return simulated_systems.draw_systems(report["runs"], heading)


def simulated_ablation() -> Figure:
    """Draw the best combination in the simulator, without each of its parts."""
    report = read_report(SIMULATED, SIMULATED_KEYS)
    heading = simulated_systems.heading_of(report["settings"])
    return simulated_systems.draw_changes(report["runs"], f"{heading}\n7B, up to 16k tokens")


IMAGES = {
    "step_eight_ranks": step_eight_ranks,
    "drafted_tokens": drafted_tokens,
    "memory_7b": memory_7b,
    "simulated_systems": simulated_systems_figure,
    "simulated_ablation": simulated_ablation,
}


def main() -> int:
    names = sys.argv[1:] or list(IMAGES)
    if unknown := [name for name in names if name not in IMAGES]:
        print(f"error: {unknown[0]} unknown; valid are {', '.join(IMAGES)}", file=sys.stderr)
        return 2
    for name in names:
        path = os.path.join(FOLDER, f"{name}.png")
        IMAGES[name]().savefig(path, dpi=120)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
