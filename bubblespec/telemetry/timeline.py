"""Timelines of all ranks in chosen steps: a trace for Perfetto or chrome://tracing, and a picture.

A rank notes spans of time by its own clock. Clocks may have different zeros; barriers, which all
ranks leave at about the same time, show the difference."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import numpy as np

from bubblespec.errors import log

if TYPE_CHECKING:  # readers of timelines do not wait for torch
    from bubblespec.distributed.ranks import Ranks
    from bubblespec.records import Span

# Names in traces and pictures, and colours, in the order of the legend. Useful work is in strong
# colours; idle time is pale, and gaps between spans are white.
STYLES = {
    "prefill": ("prefill", "#08519c"),
    "decode": ("generate", "#5aa5e0"),
    "verify": ("verify drafts", "#1b9e77"),
    "shared": ("TP tail", "#7a9a01"),
    "draft (co-scheduled)": ("draft (co-scheduled)", "#f2c230"),
    "draft (idle)": ("draft (idle)", "#e3701a"),
    "score": ("score responses", "#f4a6c0"),
    "gradient": ("stream gradients", "#c9a9e8"),
    "train drafter": ("train drafter", "#9c8ade"),
    "wait": ("idle", "#e4e4e4"),
    "reward": ("reward", "#e78ac3"),
    "exchange": ("exchange drafts", "#8c510a"),
    "train": ("train", "#7b52ab"),
    "sync": ("sum gradients", "#1a1a1a"),
}
KINDS = list(STYLES)
LABELS = {kind: label for kind, (label, _) in STYLES.items()}
COLOURS = {kind: colour for kind, (_, colour) in STYLES.items()}
GAPS = "between forwards"  # in the legend
NUM_BARRIERS = 11


def step_spans(spans: list[Span], stages: list[Span]) -> list[tuple[str, float, float]]:
    """Return a step's spans in order, with gaps in waiting, reward and training filled.

    stages: the step's (gen, wait, reward, train, ...), one after the other. Gaps in gen, the host's
    work between forwards, stay empty."""
    filled = []
    for kind, begin, end in stages:
        if kind == "gen":
            continue
        for _, inner_begin, inner_end in [span for span in spans if begin <= span[1] < end]:
            filled.append((kind, begin, inner_begin))
            begin = inner_end
        filled.append((kind, begin, end))
    filled = [stage for stage in filled if stage[2] > stage[1]]
    return sorted([*spans, *filled], key=lambda span: span[1])


def clock_offsets(ranks: Ranks) -> np.ndarray:
    """Return the seconds that each rank's clock is ahead of rank 0's, float64 [ranks]."""
    times = []
    for _ in range(NUM_BARRIERS):
        ranks.barrier()
        times.append(time.perf_counter())
    by_rank = ranks.all_gather(np.array(times))
    # on a busy machine a rank leaves some barriers late
    return np.median(by_rank - by_rank[0], axis=1)


def gather_lanes(ranks: Ranks, spans: list[Span], stages: list[Span]) -> list[np.ndarray]:
    """Return the spans of all ranks, on every rank: a list by rank of float64 [spans, 3].

    The columns are the index in KINDS, begin and end in seconds since the first rank began the
    step. Called by all ranks together; see `step_spans` for the arguments."""
    offsets = clock_offsets(ranks)
    zero = offsets[ranks.rank] + (ranks.all_gather(np.array(stages[0][1])) - offsets).min()
    whole = step_spans(spans, stages)
    numbers = np.array([(KINDS.index(kind), *(np.array(at) - zero)) for kind, *at in whole])
    return [lane.reshape(-1, 3) for lane in ranks.gather_ragged(numbers.ravel())]


def save_timeline(output_dir: str, step: int, lanes: list[np.ndarray], method: str) -> None:
    """Write output_dir/timeline/step_00012.json and .png; a failure is a warning."""
    path = os.path.join(output_dir, "timeline", f"step_{step:05d}")
    title = f"step {step}, speculative.method={method}"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.json", "w", encoding="utf-8") as file:
            json.dump(trace(lanes, title), file)
        draw(f"{path}.png", lanes, title)
    except OSError as error:
        log(f"warning: the timeline of step {step} could not be written: {error.strerror}")


def trace(lanes: list[np.ndarray], title: str) -> dict:
    """Return the step in Chrome's trace event format: a thread per rank, an "X" event per span."""

    def event(phase: str, name: str, rank: int, **fields) -> dict:
        return {"ph": phase, "name": name, "pid": 0, "tid": rank, **fields}

    events = [event("M", "process_name", 0, args={"name": title})]
    for rank, lane in enumerate(lanes):
        events.append(event("M", "thread_name", rank, args={"name": f"rank {rank}"}))
        # whole nanoseconds, so that rounding makes no overlaps
        begin, end = np.rint(lane[:, 1:].T * 1e9).astype(np.int64)
        columns = (lane[:, 0].astype(int), begin / 1000, (end - begin) / 1000)
        for kind, ts, dur in zip(*columns, strict=True):
            events.append(event("X", LABELS[KINDS[kind]], rank, ts=float(ts), dur=float(dur)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(path: str, lanes: list[np.ndarray], title: str) -> None:
    from matplotlib.figure import Figure  # here, as it takes half a second

    figure = Figure(figsize=(12, 1.5 + 0.4 * len(lanes)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    legend = {"handles": draw_lanes(axes, lanes), "frameon": False, "fontsize": 9}
    figure.legend(**legend, loc="outside lower center", ncols=7)
    axes.set_title(title, fontsize=10)
    figure.savefig(path)


def draw_lanes(axes, lanes: list[np.ndarray]) -> list:
    """Draw the lanes on matplotlib axes, each with its share of idle time.

    Return the legend's patches in the order of KINDS, then that of gaps, if any can be seen."""
    from matplotlib.patches import Patch

    end = max(lane[:, 2].max() for lane in lanes)
    beside = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
    for rank, lane in enumerate(lanes):
        # One collection per kind and lane, however many forwards.
        for number in np.unique(lane[:, 0]).astype(int):
            begins, ends = lane[lane[:, 0] == number, 1:].T
            stretches, colour = np.stack((begins, ends - begins), axis=1), COLOURS[KINDS[number]]
            axes.broken_barh(stretches, (rank - 0.4, 0.8), facecolors=colour, linewidth=0)
        waits = lane[lane[:, 0] == KINDS.index("wait")]
        share = (waits[:, 2] - waits[:, 1]).sum() / end
        axes.text(1.005, rank, f"idle {share:.0%}", color="#666666", **beside)
    axes.set_xlabel("seconds")
    axes.set_xlim(0, end)
    axes.set_yticks(range(len(lanes)), [f"rank {rank}" for rank in range(len(lanes))])
    axes.set_ylim(len(lanes) - 0.5, -0.5)  # rank 0 on top
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [KINDS[int(number)] for number in np.unique(np.concatenate(lanes)[:, 0])]
    patches = [Patch(facecolor=COLOURS[kind], label=LABELS[kind]) for kind in kinds]
    gaps = np.concatenate([lane[:, 1] - np.append(0.0, lane[:-1, 2]) for lane in lanes])
    if gaps[gaps > 0].sum() > 0.01 * end:
        patches.append(Patch(facecolor="white", edgecolor="#999999", label=GAPS))
    return patches
