"""Make the golden checkpoint beside this file with Megatron-Core itself: `python make.py FOLDER` (megatron-core 0.16.1, no GPU).

A GPT of two layers and AdamW after a step, in the form "torch_dist". `expected.pt` has what they hold.
"""

import argparse
import os
import sys
import warnings

import torch
import torch.distributed as dist


def main() -> None:
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo")
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda *_: None
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=4, num_attention_heads=2, use_cpu_initialization=True, pipeline_dtype=torch.float32
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=8, max_sequence_length=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    expected = {
        "model": {name: p.detach().clone() for name, p in model.named_parameters()},
        "state": {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in model.named_parameters()},
    }
    sharded = model.sharded_state_dict()
    state = optimizer.state_dict()
    step = optimizer.state[next(model.parameters())]["step"]
    optim_state_to_sharding_state(
        state, get_param_id_to_sharded_param_map(sharded, model.parameters()), exclude_keys="step"
    )
    state["state"]["common_step"] = step  # as Megatron's own optimizers do
    folder = sys.argv[1]
    os.makedirs(folder)
    body = {"model": sharded, "optimizer": state, "iteration": 1, "checkpoint_version": 3.0}
    body |= {"args": argparse.Namespace(num_layers=2), "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 1}}
    dist_checkpointing.save(body, folder)
    torch.save(expected, os.path.join(folder, "expected.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
