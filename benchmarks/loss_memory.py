"""Peak memory and time of the loss head, whole against chunked: python benchmarks/loss_memory.py

Each case runs in a process of its own, and reports the growth of its peak resident memory (on CUDA: of its peak allocation).
"""

import argparse
import multiprocessing
import resource
import time

import torch

from bubblespec.learn.losses import token_logprobs


def measure(connection, tokens: int, hidden_size: int, vocab: int, max_logits: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = torch.nn.Linear(hidden_size, vocab, bias=False, device=device)
    hidden = torch.randn(tokens, hidden_size, device=device, requires_grad=True)
    target = torch.randint(vocab, (tokens,), device=device)
    head.weight.grad = torch.zeros_like(head.weight)

    def peak() -> int:
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before, started = peak(), time.perf_counter()
    token_logprobs(hidden, head, target, temperature=1.0, max_logits=max_logits)[0].sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    connection.send((peak() - before, time.perf_counter() - started))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=152_064)
    arguments = parser.parse_args()
    shape = (arguments.tokens, arguments.hidden, arguments.vocab)
    print(
        f"{shape[0]} tokens, hidden {shape[1]}, vocabulary {shape[2]}: all logits are {shape[0] * shape[2] * 4 / 2**30:.2f} GiB"
    )
    print(f"{'max_logits_per_chunk':>22} {'peak GiB':>9} {'seconds':>8}")
    for max_logits in (shape[0] * shape[2], 1 << 26, 1 << 24):
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(sender, *shape, max_logits))
        process.start()
        grown, elapsed = receiver.recv()
        process.join()
        print(f"{max_logits:22} {grown / 2**30:9.2f} {elapsed:8.2f}")


if __name__ == "__main__":
    main()
