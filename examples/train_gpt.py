"""Train a byte-level GPT on real text, data-parallel with shardwright.

    torchrun --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py
    ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 examples/train_gpt.py

The global batch is the same for any number of ranks: each rank takes its own rows.
README.md beside this file has the expected output.
"""

from __future__ import annotations

import time

import shardwright as sw
import torch
from gpt import checkpoint, data, ranks
from gpt.loss import summed_loss, validate
from gpt.model import GPT
from gpt.options import COMPRESSORS, parse_options
from gpt.report import Reporter, draw_loss_curve, printable
from gpt.threads import Threads

REPORT_EVERY = 10  # steps between exchanges of losses and of the decision to stop
WARMUP_STEPS = 100


def learning_rate_at(step: int, peak: float) -> float:
    """Rise for WARMUP_STEPS, then fall as 1/sqrt(step). There is no last step, so any run can go on."""
    done = (step + 1) / WARMUP_STEPS
    return peak * min(done, done**-0.5)


def main() -> None:
    options = parse_options()
    threads = Threads()
    torch.manual_seed(options.seed)
    shape = dict(layers=options.layers, width=options.width, heads=options.heads)
    model = GPT(context=options.context, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)
    how = dict(zero=options.zero, compress=COMPRESSORS[options.compress], bucket_cap_mb=options.bucket_cap_mb)
    model, optimizer = sw.wrap(model, optimizer, **how)

    rank, world_size = ranks.rank_and_world_size()
    batches, held_out = data.load(options, rank, world_size)
    run = checkpoint.Run(options, batches.generator)
    checkpoints, step = checkpoint.open_checkpoints(options, rank, model, optimizer, run)

    reporter = Reporter(enabled=rank == 0, first_step=step, last_step=options.steps)
    parameters = sum(p.numel() for p in model.parameters())
    reporter.say(f"{parameters:,} parameters, {world_size} ranks, {len(batches.text):,} bytes")
    if not run.validation:
        run.validation.append((0, validate(model.module, *held_out)))
        reporter.say(f"step     0   validation {run.validation[0][1]:.3f} nats/byte")

    tokens_a_step = options.batch_size * options.context
    first_step, started, training_s, tokens_per_s = step, time.monotonic(), 0.0, 0.0
    unreported, out_of_time = [], False
    while step < options.steps and not out_of_time:
        step_started = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, options.learning_rate)
        # Ranks may have unequal numbers of rows. Divided by an equal part of the tokens, the
        # average over ranks is the mean over the global batch for any world size.
        loss = summed_loss(model, *batches.next()) / (tokens_a_step / world_size)
        loss.backward()
        sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        unreported.append(loss.item())
        step += 1
        if said := threads.after_step(time.monotonic() - step_started):
            reporter.say(said)
        training_s += time.monotonic() - step_started

        if step % REPORT_EVERY == 0 or step == options.steps:
            # One exchange for losses and clock, so that ranks stop at the same step.
            late = time.monotonic() - started > options.minutes * 60
            *sums, late_ranks = ranks.sum_over_ranks([*unreported, float(late)])
            first = step - len(sums) + 1
            run.train += [(first + i, total / world_size) for i, total in enumerate(sums)]
            unreported, out_of_time = [], late_ranks > 0
            tokens_per_s = (step - first_step) * tokens_a_step / training_s
            reporter.trained(step, run.train[-1][1], tokens_per_s)

        if step % options.validate_every == 0 or step == options.steps or out_of_time:
            run.validation.append((step, validate(model.module, *held_out)))
            reporter.validated(step, run.train, run.validation[-1][1], tokens_per_s)
            checkpoints.save(step - 1)  # returns at once; training goes on during the write
    reporter.close()
    checkpoints.close()

    if rank == 0:
        sample = model.module.generate(b"def ", 400, temperature=0.7, seed=options.seed)
        print(f"trained for {training_s:.0f} s\n\nsample:\n{printable(sample)}\n")
        print(draw_loss_curve(options.out / "loss.png", run.train, run.validation))
        before, after = run.validation[0][1], run.validation[-1][1]
        print(
            f"demo: validation loss {before:.2f} -> {after:.2f} nats/byte,"
            f" {world_size} ranks, {tokens_per_s:,.0f} tokens/s"
        )
    ranks.leave()


if __name__ == "__main__":
    main()
