"""Law: accelerate's own test_checkpointing passes with our Accelerator at every stage: training, saved and resumed
values agree. Small stand-ins replace the model, tokenizer and data set that it downloads.
"""

import contextlib
import importlib
import io
import os
import sys
import types
from unittest import mock

import pytest
import torch
from peer import PEER

pytest.importorskip("accelerate", reason="an optional extra")

from test_accelerate_trains_with_ours import Accelerator, launched  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
SCRIPT = "accelerate.test_utils.scripts.external_deps.test_checkpointing"


class Tokens(dict):
    """A batch: a dict that can be moved to a device."""

    def to(self, *args, **kwargs):
        return self


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(20, 50), nn.Linear(50, 2)

    def forward(self, inputs, labels):
        logits = self.head(torch.tanh(self.hidden(inputs)))
        return types.SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits, labels))


class Accuracy:
    """The accuracy of everything added since the last result."""

    def __init__(self):
        self.right = []

    def add_batch(self, predictions, references):
        self.right.append((predictions == references).float())

    def compute(self):
        found = torch.cat(self.right).mean().item()
        self.right = []
        return {"accuracy": found}


def loaders(accelerator, batch_size, model_name):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(120, 20, generator=generator)
    examples = [(x, int(x[:10].sum() > 0)) for x in inputs]

    def collate(rows):
        return Tokens(inputs=torch.stack([x for x, _ in rows]), labels=torch.tensor([label for _, label in rows]))

    def loader(rows, **options):
        return torch.utils.data.DataLoader(rows, collate_fn=collate, **options)

    return loader(examples[:80], shuffle=True, batch_size=batch_size), loader(examples[80:], batch_size=8)


def schedule(optimizer, num_warmup_steps, num_training_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_training_steps))


def stand_ins():
    """Return the packages that the script imports, as far as it uses them."""
    made = {name: types.ModuleType(name) for name in ("datasets", "evaluate", "transformers")}
    made["datasets"].load_dataset = None
    made["evaluate"].load = lambda *names: Accuracy()
    made["transformers"].AutoTokenizer = None
    made["transformers"].AutoModelForSequenceClassification = types.SimpleNamespace(
        from_pretrained=lambda name, return_dict: Classifier()
    )
    made["transformers"].get_linear_schedule_with_warmup = schedule
    made["transformers"].set_seed = torch.manual_seed
    return made


def run_script(rank, world_size, zero, folder):
    made = []

    class OfThisStage(Accelerator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, zero=zero, **kwargs)
            assert self.num_processes == world_size == 2
            made.append(self)

    config = {"lr": 1e-2, "num_epochs": 3, "seed": 42, "batch_size": 8}
    options = {"model_name_or_path": "small", "output_dir": folder, "partial_train_epoch": 2}
    with mock.patch.dict(sys.modules, stand_ins()):
        script = importlib.import_module(SCRIPT)
    with contextlib.redirect_stdout(io.StringIO()):
        script.Accelerator, script.get_dataloaders = OfThisStage, loaders
        for resumed in (None, "epoch_0", "epoch_1"):
            path = None if resumed is None else os.path.join(folder, resumed)
            with launched(rank, world_size):
                script.training_function(config, types.SimpleNamespace(**options, resume_from_checkpoint=path))
    assert len(made) == 3


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_accelerate_s_own_test_of_checkpoints_passes_at_2_processes(fresh_ranks, tmp_path, zero):
    with fresh_ranks(2) as team:
        team.run(run_script, zero=zero, folder=str(tmp_path))
