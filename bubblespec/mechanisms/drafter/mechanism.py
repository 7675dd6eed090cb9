"""The learned drafter of a run (TLT, arXiv 2511.16665): warm start, drafting, training."""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.chain_runner import ChainRunner, profile
from bubblespec.draft.chains import ChainSource
from bubblespec.engine.engine import Engine
from bubblespec.errors import InputError, log
from bubblespec.mechanisms.drafter import warm_start
from bubblespec.mechanisms.drafter.layer import DRAFTER_FOLDER, Drafter, read_drafter, save_drafter
from bubblespec.mechanisms.drafter.runner import MAX_CHAIN_LENGTH, MAX_ROWS, DrafterRunner
from bubblespec.mechanisms.drafter.training import DrafterTraining, TrainDrafter
from bubblespec.planner.costs import CostModel
from bubblespec.records import StepRecord
from bubblespec.rollout.mechanism import Mechanism
from bubblespec.rollout.plan import RolloutPlan
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import Row

NAME = "drafter"
PRIOR = 0.6  # acceptance rate of each position before measurements: enough to be tried


def make_source(runner: ChainRunner, cost: CostModel, clock) -> ChainSource:
    """Create the drafter's source, and time forwards of the drafter. cost: of the policy's."""
    own_cost, options = profile(runner, clock, MAX_ROWS), {"prior": PRIOR, "clock": clock}
    return ChainSource(NAME, runner, cost, own_cost, longest=MAX_CHAIN_LENGTH, **options)


class DrafterMechanism(Mechanism):
    """The drafter, its source of draft tokens and its training."""

    name = NAME

    def __init__(
        self,
        sampler: Sampler,
        model: PreTrainedModel,
        checkpoint: str | None,
        set_kernels: Callable[[torch.nn.Module], None],
        kernel: str = "sdpa",
    ):
        """set_kernels: chooses kernels of linear layers; kernel: of attention in training.

        Raises InputError for a saved drafter that does not fit."""
        self.sampler, self.model, self.set_kernels = sampler, model, set_kernels
        self.kernel = kernel
        self.config, self.ranks, self.params = sampler.config, sampler.ranks, sampler.params
        self._saved = read_drafter(self.config, model, checkpoint, warns=self.ranks.is_main)
        self.training: DrafterTraining | None = None
        """None until `start`, and in a run that is complete already."""
        self.source: ChainSource
        self.runner: DrafterRunner
        self._moved: dict[int, DrafterRunner] = {}  # by id() of the engine

    def start(self, trainer) -> None:
        """Take the drafter of the checkpoint, else of drafter.path, else train one.

        Raises StopRequested, and InputError for a policy that cannot have a drafter."""
        config, sampler, step = self.config, self.sampler, trainer.num_updates
        if step >= config.run.max_steps:
            return
        with trainer.reporter.phase("preparing the drafter"):
            rows: list[Row] = []
            if self._saved is None:
                self.ranks.activity = "warm start of the drafter"
                rows = warm_start.generate(sampler, step)
            training = self.training = self._make_training(rows)
            # The warm start generates the beginnings of episodes alone.
            if "bubble" in config.speculative.sources and not config.environment.is_used:
                sampler.keep_as_drafts(rows, step, are_deferred=False)
            trainer.learner.on_hidden = training.take

    def _make_training(self, rows: list[Row]) -> DrafterTraining:
        """Create the training and its source. rows: to learn from where none was saved."""
        config, ranks, params, sampler = self.config, self.ranks, self.params, self.sampler
        assert sampler.proposer is not None
        if self._saved is None:
            ids = warm_start.frequent_ids(rows, params.stop_token_ids, ranks)
            try:
                drafter, num_updates = Drafter(self.model, ids, config.run.seed), 0
            except ValueError as error:
                problem = f"no drafter for this policy: {error}"
                raise InputError(f"speculative.method: {problem}") from error
        else:
            drafter, num_updates = self._saved
        self.set_kernels(drafter)
        runner = self.runner = DrafterRunner(drafter, sampler.engine, params)
        training = DrafterTraining(
            drafter, params.temperature, config.run.seed, self.kernel, ranks.clock
        )
        training.num_updates = num_updates
        if self._saved is None:
            examples = warm_start.examples_from(self.model, rows, training.kernel)
            warm_start.train(training, examples, ranks)
            if ranks.is_main:
                responses = f"(drafter.warm_start = {config.drafter.warm_start})"
                of = f"the policy's own responses {responses}"
                log(f"drafter: trained with {training.num_updates} updates on {of}")
        runner.enable(True)
        self.source = make_source(runner, sampler.proposer.cost, ranks.clock)
        sampler.proposer.add(self.source)
        return training

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Draft and learn in rollouts of steps, unless the guard leaves drafts out."""
        if self.training is None:
            return
        is_used = plan.is_on and plan.step is not None and not self.training.has_failed
        self.training.is_enabled = is_used
        self.source.is_enabled = is_used and self.source.problem is None
        self.runner.enable(self.source.is_enabled)
        if is_used:  # on all ranks or on none: a problem of the source may be known to one alone
            plan.works.append(TrainDrafter(self.training))

    @contextlib.contextmanager
    def moved_to(self, engine: Engine) -> Iterator[None]:
        """Context in which the source drafts for the rows of another engine."""
        if self.training is None:  # the run is complete: nothing is drafted
            yield
            return
        if (runner := self._moved.get(id(engine))) is None:
            runner = DrafterRunner(self.training.drafter, engine, self.params)
            self._moved[id(engine)] = runner
        runner.enable(self.source.is_enabled)
        with self.source.moved_to(runner):
            yield

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, float]:
        """Return how far chains hold, how long they are, and what they take."""
        assert self.training is not None
        rates = ranks.gather(self.source.rates.accepted).mean(axis=0)
        metrics = {f"drafter/accepted_{n + 1}": float(rate) for n, rate in enumerate(rates)}
        metrics["drafter/mean_acceptance_length"] = 1.0 + float(rates.sum())
        metrics["drafter/num_updates"] = self.training.num_updates
        return metrics | self.source.metrics(ranks)

    def save(self, folder: str) -> None:
        """Write the drafter into a checkpoint. Raises OSError."""
        if self.training is not None and not self.training.has_failed:
            drafter, num_updates = self.training.drafter, self.training.num_updates
            save_drafter(os.path.join(folder, DRAFTER_FOLDER), drafter, num_updates)
