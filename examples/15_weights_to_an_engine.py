"""Train at zero=3 on two ranks, and hand the weights to an engine, a process of its own, after each step, in chunks.

torchrun --nproc-per-node 2 examples/15_weights_to_an_engine.py

The engine stands for a server of generations in reinforcement learning: it makes the samples of the next step, and its
rewards are the training's. No rank holds the whole model; the engine gets it a chunk at a time through a pipe.
"""

import shardwright as sw
import torch
import torch.multiprocessing as processes

STEPS, SAMPLES, WORDS, WIDTH = 5, 256, 8, 64
CHUNK_BYTES = 64 << 10  # 256 MiB or more for a real model


def policy():
    return torch.nn.Sequential(torch.nn.Embedding(1, WIDTH), torch.nn.Linear(WIDTH, 512), torch.nn.Linear(512, WORDS))


def engine(requests):
    """Take weights as they come, in bfloat16 as a server does, and answer with samples."""
    torch.set_num_threads(1)
    model = policy().to(torch.bfloat16)
    parameters, taken = dict(model.named_parameters()), 0
    while True:
        name, values = requests.recv()
        if name is None:
            return
        if name:
            parameters[name].data.copy_(values)
            taken += 1
            continue
        torch.manual_seed(values)
        with torch.no_grad():
            chances = model(torch.zeros(1, dtype=torch.long)).float().softmax(-1)[0]
        words = torch.multinomial(chances, SAMPLES, replacement=True)
        requests.send((words, chances[-1].item(), taken))


def main():
    sw.init_process_group()
    rank = torch.distributed.get_rank()
    pipe, process = None, None
    if rank == 0:  # before threads and memory of training
        context = processes.get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=engine, args=(other,), daemon=True)
        process.start()
    torch.manual_seed(0)
    model = policy()
    model, optimizer = sw.wrap(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), zero=3, share_parameters=False, units=(torch.nn.Linear,)
    )
    for step in range(STEPS):
        for name, values in sw.iter_full_parameters(model, ranks=0, bytes=CHUNK_BYTES, dtype=torch.bfloat16):
            if pipe is not None:
                pipe.send((name, values))
        words = torch.empty(SAMPLES, dtype=torch.long)
        if pipe is not None:
            pipe.send(("", step))
            words, chance, taken = pipe.recv()
            print(f"step {step}: the engine took {taken} tensors and says the last word with {chance:.3f}", flush=True)
        torch.distributed.broadcast(words, 0)
        mine = words[rank :: torch.distributed.get_world_size()]
        rewards = mine.float() - mine.float().mean()  # the later the word, the better
        chances = model(torch.zeros(1, dtype=torch.long)).log_softmax(-1)[0]
        loss = -(rewards * chances[mine]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if pipe is not None:
        pipe.send((None, None))
        process.join()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
