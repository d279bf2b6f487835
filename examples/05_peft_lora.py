"""PEFT's LoRA over a frozen bfloat16 base, in a plain loop with sw.wrap. See README.md.

    torchrun --nproc-per-node 2 examples/05_peft_lora.py [stage]
    torchrun --nproc-per-node 2 examples/05_peft_lora.py ddp            # torch's DistributedDataParallel

It tunes a small Llama on made sentences and saves the adapter.
"""

import os
import sys
import tempfile

import peft
import shardwright as sw
import torch
import transformers


def rows(rank, step):
    """Return sentences that count up from random numbers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randint(0, 61, (8, 1), generator=generator) + torch.arange(16)) % 61


def main():
    torch.set_num_threads(1)
    stage = sys.argv[1] if len(sys.argv) > 1 else "3"
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    lora = peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0)
    bare = peft.get_peft_model(base, lora, autocast_adapter_dtype=True)
    trained = [p for p in bare.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    if stage == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(bare)
    else:
        model, optimizer = sw.wrap(bare, optimizer, zero=int(stage))
    total = torch.zeros(())
    for step in range(40):
        tokens = rows(rank, step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach() / 10
        if step % 10 == 9:
            torch.distributed.all_reduce(total)
            if rank == 0:
                print(f"steps {step - 9} to {step}: loss {total / torch.distributed.get_world_size():.4f}", flush=True)
            total.zero_()
    folder = tempfile.mkdtemp()
    state = bare.state_dict() if stage == "ddp" else sw.full_state_dict(model)
    if rank == 0:
        bare.save_pretrained(folder, state_dict=state)
        counts = sum(p.numel() for p in trained), sum(p.numel() for p in bare.parameters())
        size = os.path.getsize(f"{folder}/adapter_model.safetensors")
        print(f"{counts[0]:,} of {counts[1]:,} parameters train; the adapter has {size // 1024} kB")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
