"""Law: what partition="auto" means is looked up by class, and whole tensors are divided so that ranks have equal work."""

import pytest
import shardwright as sw
import torch
from shardwright.optim import muon, rules
from shardwright.optim.ownership import divided


def made(kind, **options):
    return kind([torch.nn.Parameter(torch.ones(3, 2))], lr=0.1, **options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.optim.AdamW", "flat"),
        ("torch.optim.Muon", "tensor"),
        ("torch.optim.Adafactor", "tensor"),
        ("shardwright.optim.AdamW", "flat"),
        ("shardwright.optim.Muon", "tensor"),
        ("lion_pytorch.Lion", "flat"),
        ("schedulefree.AdamWScheduleFree", "flat"),
        ("schedulefree.SGDScheduleFree", "flat"),
        ("schedulefree.RAdamScheduleFree", "flat"),
        ("pytorch_optimizer.SOAP", "tensor"),
        ("pytorch_optimizer.Shampoo", "tensor"),
    ],
)
def test_known_classes(name, expected):
    package, _, kind = name.rpartition(".")
    found = getattr(pytest.importorskip(package), kind, None)
    if found is None:
        pytest.skip(f"the installed {package} has no {kind}")
    assert rules.resolve(made(found), "auto", 2) == expected
    assert rules.resolve(made(found), "tensor", 2) == "tensor"


@pytest.mark.parametrize(
    "name",
    [
        "prodigyopt.Prodigy",
        "dadaptation.DAdaptAdam",
        "dadaptation.DAdaptSGD",
        "dadaptation.DAdaptAdaGrad",
        "dadaptation.DAdaptLion",
    ],
)
def test_a_step_size_that_sums_over_all_parameters_is_refused(name):
    package, kind = name.split(".")
    found = getattr(pytest.importorskip(package), kind)
    for partition in ("auto", "flat", "tensor"):
        with pytest.raises(
            ValueError, match=f"{kind} cannot be sliced, since its step size is a sum over all parameters"
        ):
            rules.resolve(made(found), partition, 2)
    assert rules.resolve(made(found), "auto", 1) == "flat"
    if "AdaGrad" not in kind:
        on_gpu = found([torch.nn.Parameter(torch.ones(3, 2, device="meta"))], lr=0.1, fsdp_in_use=True)
        assert rules.resolve(on_gpu, "auto", 2) == "flat"
        with pytest.raises(ValueError, match="use zero=0 .fsdp_in_use=True, which sums over ranks on GPUs alone"):
            rules.resolve(made(found, fsdp_in_use=True), "auto", 2)


class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})


def test_a_class_is_registered():
    with pytest.raises(ValueError, match="Signs is not known to be elementwise.*sw.optim.register says so"):
        rules.resolve(made(Signs), "auto", 2)
    sw.optim.register(Signs, partition="tensor", cost=lambda shape, group: shape[0] * group["lr"])
    try:
        assert rules.resolve(made(Signs), "auto", 2) == "tensor"
        assert rules.rule_of(made(Signs)).cost((3, 2), {"lr": 0.5}) == 1.5
    finally:
        rules._registered.clear()


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((int, "flat"), TypeError, "kind must be a class of torch.optim.Optimizer, got <class 'int'>"),
        ((Signs, "auto"), ValueError, "partition must be 'flat' or 'tensor', got 'auto'"),
        ((Signs, "flat", 3), TypeError, r"cost must be a function of \(shape, group\), got 3"),
    ],
)
def test_a_wrong_registration_is_refused(arguments, error, sentence):
    kind, partition, *cost = arguments
    with pytest.raises(error, match=sentence):
        sw.optim.register(kind, partition=partition, cost=cost[0] if cost else None)


def llama_8b():
    """Return the shapes of Llama-3-8B."""
    layer = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    return [(128256, 4096), *(layer + [(4096,), (4096,)]) * 32, (4096,), (128256, 4096)]


@pytest.mark.parametrize(("ranks", "most"), [(8, 1.02), (64, 1.07)])
def test_ranks_have_equal_work(ranks, most):
    groups = [{"algorithm": "adamw" if shape[0] == 128256 or len(shape) == 1 else "muon"} for shape in llama_8b()]
    costs = [rules.matrix_cost(shape, group) for shape, group in zip(llama_8b(), groups)]
    loads = [0.0] * ranks
    owners = divided(costs, loads)
    for rank, load in enumerate(loads):
        assert load == pytest.approx(sum(cost for cost, owner in zip(costs, owners) if owner == rank))
    assert max(loads) / (sum(loads) / ranks) <= most


def test_blocks_and_stacks_are_counted():
    one = rules.matrix_cost((64, 64), {}) - rules.element_cost((64, 64), {})
    assert rules.matrix_cost((3, 64, 64), {}) - rules.element_cost((3, 64, 64), {}) == 3 * one
    assert rules.matrix_cost((192, 64), {"rows": (64, 64, 64)}) - rules.element_cost((192, 64), {}) == 3 * one


def modules():
    embedding, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10)
    return torch.nn.ModuleDict(
        {"words": embedding, "body": torch.nn.Linear(4, 4), "head": head, "image": torch.nn.Conv1d(4, 4, 3)}
    )


def test_groups_are_seen_and_changed():
    named = {group["algorithm"]: group["names"] for group in sw.optim.muon_groups(modules())}
    assert named["muon"] == ["body.weight"]
    assert set(named["adamw"]) == {
        "words.weight",
        "body.bias",
        "head.weight",
        "head.bias",
        "image.weight",
        "image.bias",
    }
    changed = sw.optim.muon_groups(modules(), rule=lambda name, p: "muon" if name == "head.weight" else None)
    assert changed[0]["names"] == ["body.weight", "head.weight"]
    apart = sw.optim.muon_groups(modules(), rows=lambda name, p: [2, 2])
    assert apart[0]["rows"] == (2, 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr": -1.0}, "lr must be >= 0, got -1.0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"ns_steps": 100}, r"ns_steps must be in \[1, 99\], got 100"),
        ({"adjust_lr_fn": "mine"}, "adjust_lr_fn must be None or one of .*, got 'mine'"),
        ({"ns_dtype": "float16"}, "ns_dtype must be one of .*, got 'float16'"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0, got -0.1"),
        ({"eps": -1.0}, "eps must be >= 0, got -1.0"),
    ],
)
def test_a_wrong_option_of_muon_is_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=f"sw.optim.Muon: {sentence}"):
        sw.optim.Muon(torch.nn.Linear(4, 4), **options)


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        (
            {"params": [torch.nn.Parameter(torch.ones(3))]},
            r"parameter 0 of group 0 must be a matrix or a stack of matrices, not of shape \(3,\)",
        ),
        (
            {"params": [torch.nn.Parameter(torch.ones(3, 2))], "rows": (1, 1)},
            r"rows \(1, 1\) must add up to the 3 rows of parameter 0",
        ),
        (
            {"params": [torch.nn.Parameter(torch.ones(3, 2))], "algorithm": "lion"},
            "algorithm must be 'muon' or 'adamw', got 'lion'",
        ),
    ],
)
def test_a_group_that_does_not_fit_is_one_sentence(group, sentence):
    with pytest.raises(ValueError, match=f"sw.optim.Muon: {sentence}"):
        sw.optim.Muon([group])


def test_state_of_torchs_class_loads():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("needs torch >= 2.9")
    p, q = (torch.nn.Parameter(torch.eye(4)) for _ in range(2))
    theirs, ours = torch.optim.Muon([p], lr=0.1, momentum=0.8), sw.optim.Muon([q])

    def step(which, parameter, seed):
        parameter.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        which.step()

    step(theirs, p, 0)
    ours.load_state_dict(theirs.state_dict())
    q.data.copy_(p)
    for seed in (1, 2):
        step(theirs, p, seed)
        step(ours, q, seed)
    assert torch.equal(p, q)


def test_a_group_keeps_what_a_saved_one_lacks():
    matrix, vector = torch.nn.Parameter(torch.eye(4)), torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [matrix], "rows": (2, 2)}, {"params": [vector], "algorithm": "adamw"}]
    optimizer = sw.optim.Muon(groups, ns_dtype="float32")
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        for key in ("rows", "algorithm", "ns_dtype"):
            del group[key]
    optimizer.load_state_dict(saved)
    found = [(group["algorithm"], group["rows"], group["ns_dtype"]) for group in optimizer.param_groups]
    assert found == [("muon", (2, 2), "float32"), ("adamw", (), "float32")]


def test_hidden_layers_and_position_embeddings_are_told_apart():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = torch.nn.Embedding(64, 16), torch.nn.Embedding(16, 16)
            self.hidden, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 64)
            self.cls = torch.nn.Parameter(torch.zeros(1, 1, 16))

    assert sw.optim.muon_groups(Model())[0]["names"] == ["hidden.weight"]


@pytest.mark.parametrize("shape", [(5, 12, 9), (3, 16, 16), (2, 150, 120)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stack_is_made_orthogonal_as_its_matrices_are(shape, dtype):
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    how = (3.4445, -4.7750, 2.0315), 5, 1e-7, dtype
    found, expected = muon.orthogonal(given, *how), torch.stack([muon.orthogonal(each, *how) for each in given])
    tolerance = 0.03 if dtype is torch.bfloat16 else 1e-4  # a processor's batched product may add in another order
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_blocks_of_rows_and_stacks_are_each_made_orthogonal():
    given = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))

    def stepped(value, **options):
        p = torch.nn.Parameter(torch.zeros_like(value))
        optimizer = sw.optim.Muon([{"params": [p], **options}], lr=1.0, weight_decay=0.0)
        p.grad = value.clone()
        optimizer.step()
        return p.detach()

    halves = torch.cat([stepped(half) for half in given.split(4)])
    assert torch.equal(stepped(given, rows=(4, 4)), halves)
    assert torch.equal(stepped(given.reshape(2, 4, 6)).reshape(8, 6), halves)
    assert not torch.equal(stepped(given), halves)
