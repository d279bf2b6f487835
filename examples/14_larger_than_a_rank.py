"""A model that no rank ever holds whole: built on the meta device, trained at zero=3, saved, resumed, exported, read again.

    torchrun --nproc-per-node 4 examples/14_larger_than_a_rank.py FOLDER
    torchrun --nproc-per-node 2 examples/14_larger_than_a_rank.py FOLDER      # goes on, with another number of ranks

Each run trains 4 steps, after those that FOLDER has, and saves. Then it exports a folder of safetensors, builds the model
from it anew, and writes text. While the model is built, and while it is loaded and writes, a thread watches the memory (PSS)
of each rank, which stays below the model's size. See README.md.
"""

import contextlib
import io
import sys
import threading

import shardwright as sw
import torch
import torch.distributed as dist
from gpt.data import TrainingBatches, load_corpus
from gpt.model import GPT
from shardwright_tools.cli import main as shardwright
from torch import nn
from torch.nn import functional as F

BATCH, CONTEXT, STEPS = 4, 32, 4
PROMPT, LENGTH = b"import ", 8
PRIVATE = {"zero": 3, "share_parameters": False}
MIB = 1 << 20


def pss():
    """Return the bytes of memory that this rank holds; a shared page counts in parts."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


@contextlib.contextmanager
def below(limit, what, start):
    """Run the body, and end the program if a rank meanwhile held more than `limit` bytes above `start`."""
    peak, ended = [0], threading.Event()

    def watch():
        while not ended.wait(0.05):  # a look takes 5 ms
            peak[0] = max(peak[0], pss() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    most = torch.tensor(peak[0])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    held = f"{what}: a rank held at most {most.item() / MIB:.0f} MiB"
    if most > limit:
        raise SystemExit(f"{held}, which is more than {limit / MIB:.0f}")
    say(held)


def say(*words, **where):
    if dist.get_rank() == 0:
        print(*words, flush=True, **where)


def build():
    with torch.device("meta"):
        return GPT(context=CONTEXT, layers=12, width=256, heads=4)


def init(module):
    """Give a module the values that GPT's own constructor gives it."""
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    else:
        nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def train(model, optimizer, batches, first, end):
    for step in range(end):
        tokens, targets = batches.next()  # of the steps before `first`, too
        if step < first:
            continue
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        say(f"step {step}: loss {total.item() / dist.get_world_size():.4f}")


def write(model):
    """Return the prompt with the likeliest bytes behind it. Every rank calls it: blocks are gathered while they run."""
    tokens = torch.tensor([list(PROMPT)])
    with torch.no_grad():
        for _ in range(LENGTH):
            tokens = torch.cat([tokens, model(tokens[:, -CONTEXT:])[:, -1:].argmax(-1)], 1)
    return bytes(tokens[0].tolist())


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    start = pss()
    size = sum(each.nbytes for each in module.parameters())

    with below(size, f"built {size / MIB:.0f} MiB", start):
        model, optimizer = sw.wrap(module, optimizer, init=init, **PRIVATE)
    checkpointer = sw.Checkpointer(f"{folder}/checkpoints", model, optimizer)
    first = checkpointer.restore()
    share = {"context": CONTEXT, "rank": rank, "world_size": ranks, "seed": 0}
    train(model, optimizer, TrainingBatches(load_corpus()[0], batch_size=BATCH, **share), first, first + STEPS)
    checkpointer.save(first + STEPS - 1)
    checkpointer.close()
    text = write(model)
    del model, optimizer, checkpointer, module

    saved = f"{folder}/checkpoints/step-{first + STEPS:06}"
    if rank == 0:
        with contextlib.redirect_stdout(io.StringIO()):  # as the command: shardwright ckpt export ...
            failed = shardwright(["ckpt", "export", saved, f"{saved}-hf", "--to", "hf"])
        assert not failed
    dist.barrier()
    with below(size, "loaded what was exported, and wrote with it", pss()):
        model = sw.wrap(build(), weights=f"{saved}-hf", **PRIVATE)
        assert write(model) == text
    say(f"step {first + STEPS} writes {text}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
