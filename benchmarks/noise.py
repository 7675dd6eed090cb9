"""Throughput of the sampling noise, and its share of sampling: python benchmarks/noise.py [--json OUT]"""

import argparse
import json
import statistics
import time

import numpy as np
import torch

from bubblespec.engine.noise import gumbel, random_bits, stream_keys
from bubblespec.engine.sampling import SamplingParams, sample

CASES = ((1, 152_064), (8, 152_064), (64, 152_064), (8, 49_152), (64, 312))


def seconds(function, device: torch.device, repeats: int = 15) -> float:
    """Median wall time of one call."""
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    rows = []
    for count, vocab in CASES:
        index = np.arange(count)
        keys = torch.from_numpy(stream_keys(0, index, index, index, index)).to(device)
        logits = torch.randn(count, vocab, device=device)
        generated = torch.zeros(count, dtype=torch.int64, device=device)
        integer_s = seconds(lambda k=keys, v=vocab: random_bits(k, v), device)
        noise_s = seconds(lambda k=keys, v=vocab: gumbel(k, v), device)
        sample_s = seconds(lambda x=logits, k=keys, g=generated: sample(x, k, g, SamplingParams()), device)
        rows.append(
            {
                "rows": count,
                "vocab": vocab,
                "bits_ns_per_token": integer_s / count / vocab * 1e9,
                "gumbel_ns_per_token": noise_s / count / vocab * 1e9,
                "gumbel_ms": noise_s * 1e3,
                "sample_ms": sample_s * 1e3,
            }
        )
    print(f"{device}, 1 thread, torch {torch.__version__}")
    print(f"{'rows':>5} {'vocab':>8} {'bits ns':>8} {'noise ns':>9} {'noise ms':>9} {'sample ms':>10}")
    for r in rows:
        print(
            f"{r['rows']:5} {r['vocab']:8} {r['bits_ns_per_token']:8.2f} {r['gumbel_ns_per_token']:9.2f} "
            f"{r['gumbel_ms']:9.2f} {r['sample_ms']:10.2f}"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"device": str(device), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
