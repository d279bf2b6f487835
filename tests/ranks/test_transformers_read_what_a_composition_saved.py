"""Law: the folder that pipeline stages, data-parallel and tensor-parallel ranks of a Llama write together is the whole model to
transformers: from_pretrained reads it, and its logits are those of the ranks."""

import os
from pathlib import Path

import pytest
import torch
from harness import gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, sw
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
transformers = pytest.importorskip("transformers.models.llama")
auto = pytest.importorskip("transformers.models.auto")
LAYERS, VOCABULARY, LENGTH, STEPS = 2, 64, 12, 2
#: sizes of (pp, dp, tp), stage of ZeRO
CASES = (((2, 1, 2), 2), ((1, 2, 2), 3), ((2, 2, 1), 1))


def config():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=LAYERS,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        **sizes,
    )


def build():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config())


class Stage(nn.Module):
    """Some of a Llama's layers, under their names; the first stage embeds, the last has the head."""

    def __init__(self, layers):
        super().__init__()
        whole = build()
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(number): whole.model.layers[number] for number in layers})
        self.model.rotary_emb = whole.model.rotary_emb
        if 0 in layers:
            self.model.embed_tokens = whole.model.embed_tokens
        if LAYERS - 1 in layers:
            self.model.norm, self.lm_head = whole.model.norm, whole.lm_head

    def forward(self, x):
        x = self.model.embed_tokens(x) if hasattr(self.model, "embed_tokens") else x
        rotation = self.model.rotary_emb(x, position_ids=torch.arange(x.shape[1])[None])
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=rotation)
        return self.lm_head(self.model.norm(x)) if hasattr(self, "lm_head") else x


def parallelized(module, mesh):
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return parallelize_module(module, mesh, plan)


def tokens(step, place):
    generator = torch.Generator().manual_seed(10 * step + place)
    return torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("case", range(len(CASES)))
@on_every_rank(exactly=4)
def test_from_pretrained_has_the_logits_of_the_ranks(rank, world_size, case):
    sizes, zero = CASES[case]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    count, place = sizes[0], mesh.get_local_rank("pp")
    module = Stage(range(place * LAYERS // count, (place + 1) * LAYERS // count))
    if sizes[2] > 1:
        parallelized(module, mesh["tp"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module, optimizer = sw.wrap(module, optimizer, zero=zero, device_mesh=mesh["dp"])
    stage = sw.PipelineStage(module, place, count, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
    for step in range(STEPS):
        data = tokens(step, mesh.get_local_rank("dp"))
        inputs = [data[:, :-1]] if stage.is_first else []
        schedule.step(*inputs, **({"target": data[:, 1:]} if stage.is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
    folder = Path(os.environ["SW_TEST_FOLDER"]) / f"saved-{case}"
    sw.save(folder, stage, optimizer)
    mine = tokens(9, 0)[:, :-1]
    with torch.no_grad():
        logits = schedule.eval(*([mine] if stage.is_first else []), **({"target": mine} if stage.is_last else {}))
    logits = next(each for each in gather(logits) if each is not None)

    if rank == 0:
        config().save_pretrained(folder)  # the architecture; transformers looks for nothing else
    gather(None)
    read = auto.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = build()
    assert read.state_dict().keys() == expected.state_dict().keys()
    for part in gather(sw.full_state_dict(module)):
        for name, value in part.items():
            assert bits_equal(read.state_dict()[name], value), name
    with torch.no_grad():
        found = read(mine).logits
        assert torch.allclose(found, logits, rtol=0, atol=1e-5)
        if sizes[2] == 1:  # the same products of matrices
            assert bits_equal(torch.cat([read(each).logits for each in mine.chunk(2)]), logits)
        assert not torch.allclose(found, expected(mine).logits, rtol=0, atol=1e-2), "it has not trained"
