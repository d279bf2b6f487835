"""A model as counts of elements, unit by unit."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.options.mapping_files import read_mapping


class PlanError(ValueError):
    """Input that no plan can be made for. The message says what would work."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """Equal units, each of parameters that zero=3 gathers together."""

    name: str
    count: int
    tensors: tuple[int, ...]  # elements of each parameter, in registration order
    sliced: int = 0  # elements that tensor parallelism slices
    experts: int = 0  # elements that expert parallelism slices instead

    @property
    def numel(self) -> int:
        return sum(self.tensors)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model. The first unit is the outermost: what no other unit holds. Sizes are 0 for no transformer."""

    name: str
    units: tuple[Unit, ...]
    layers: int = 0
    width: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_width: int = 0
    inner: int = 0
    vocabulary: int = 0
    context: int = 0
    norm_kept: tuple[int, int] = (0, 2)  # what a norm keeps per element: bytes in float32, values as computed
    inner_kept: int = 2  # values as computed that the MLP keeps per element of its inner width
    view_of_qkv: bool = False  # v is a view of a matrix of q, k and v, which stays whole
    head_norms: bool = False  # q and k have norms
    has_head: bool = True
    experts: int = 0  # per layer
    active: int = 0  # experts that a token passes
    shared_inner: int = 0

    @property
    def numel(self) -> int:
        return sum(unit.count * unit.numel for unit in self.units)

    @property
    def active_numel(self) -> int:
        """Elements that a token passes: all but the experts that it is not routed to."""
        idle = sum(unit.count * unit.experts for unit in self.units)
        return self.numel - (idle * (self.experts - self.active) // self.experts if self.experts else 0)

    @property
    def is_transformer(self) -> bool:
        return self.width > 0


def from_numbers(
    *,
    layers: int | None = None,
    width: int | None = None,
    vocabulary: int = 32_000,
    parameters: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    inner: int | None = None,
    tied: bool = False,
) -> Shape:
    """Return a decoder as Llama has it. `parameters`: its size, from which missing sizes follow."""
    if layers is None or width is None:  # a layer for each 128 elements of width, as in Llama of 1 to 13 B
        widths = range(256, 1 << 16, 128)
        width = max((w for w in widths if 12 * w**3 // 128 + 2 * vocabulary * w <= (parameters or 0)), default=128)
        layers = width // 128
    if inner is not None and parameters is not None:
        raise PlanError("pass --parameters or --inner, not both: one follows from the other")
    if heads is None:  # heads of 128 elements, of 64 below a width of 1024
        head_width = 128 if width % 128 == 0 and width >= 1024 else 64 if width % 64 == 0 else width
        heads = width // head_width
    kv_heads = heads if kv_heads is None else kv_heads
    _divides("width", width, "heads", heads)
    _divides("heads", heads, "kv heads", kv_heads)
    head_width = width // heads
    outer = vocabulary * width * (1 if tied else 2) + width
    attention = 2 * width * width + 2 * width * kv_heads * head_width
    if inner is None and parameters is not None:
        exact = ((parameters - outer) / layers - attention - 2 * width) / (3 * width)
        inner = _multiple(exact, 16 if width >= 1024 else 1)  # so that tp divides it; within 0.04 % of a model of 8 B
        if exact < 1:
            least = outer + layers * (attention + 2 * width)
            raise PlanError(
                f"--parameters {parameters:,} is less than the {least:,} of embeddings and attention with "
                f"--layers {layers} --width {width} --vocabulary {vocabulary}"
            )
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner or _multiple(8 * width / 3, 256 if width >= 1024 else 16),
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 0,
    }
    made = from_config(config, "numbers")
    return dataclasses.replace(made, name=f"{layers} layers of width {width}, vocabulary {vocabulary}")


def _multiple(value: float, step: int) -> int:
    return max(step, round(value / step) * step)


def _divides(name: str, value: int, by_name: str, by: int) -> None:
    if by < 1 or value % by:
        raise PlanError(f"{by_name} must divide {name}, got {by_name} {by} and {name} {value}")


#: names of a size in configurations, the usual one first
_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
    "inner": ("intermediate_size", "n_inner", "ffn_dim"),
    "kv_heads": ("num_key_value_heads",),
    "context": ("max_position_embeddings", "n_positions"),
}


@dataclasses.dataclass
class _Config:
    """A configuration whose missing fields are errors that name them."""

    _fields: Mapping[str, Any]
    _where: str

    def size(self, name: str, default: int | None = None) -> int:
        """Return a size by our name. Raises PlanError if it is missing or not a positive integer."""
        names = _NAMES.get(name, (name,))
        for each in names:
            value = self._fields.get(each)
            if value is None:
                continue
            most = 10_000 if name == "layers" else 10**9
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise PlanError(f"{self._where}: {each} must be a positive integer of at most {most:,}, got {value!r}")
            return value
        if default is None:
            raise PlanError(
                f"{self._where} has no {' or '.join(names)}: add it, or pass --layers, --width, --vocabulary"
            )
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise PlanError(f"{self._where}: {name} must be true or false, got {value!r}")
        return default if value is None else value


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a model_type adds to the common form."""

    norm_vectors: int = 2  # vectors of `width` in the norms of a layer
    norm_bias: bool = False
    bias: str = ""  # matrices with a bias: "all", "qkv", "fc" (all but the head), or by the configuration's flags
    gated: bool = True
    fused: bool = False  # q, k, v in one matrix, gate and up in one
    positions: int = 0  # a table of positions: 1, plus an offset of rows
    head_norms: bool = False  # norms of each head of q and k
    tied: bool = False
    has_head: bool = True  # a final norm and logits
    norm_kept: tuple[int, int] = (4, 2)  # RMSNorm: its input and the normalised value in float32 or both as computed
    inner_kept: int = 4  # gate, its activation, up, their product
    scalar_gate: bool = False


_LLAMA = _Family()
_BIASED = _Family(norm_bias=True, bias="all", gated=False, norm_kept=(0, 2), inner_kept=2)
_FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _Family(bias="qkv"),
    "qwen3": _Family(head_norms=True),
    "qwen2_moe": _Family(bias="qkv", scalar_gate=True),
    "qwen3_moe": _Family(head_norms=True),
    "gemma": _Family(tied=True, norm_kept=(8, 1)),
    "gemma2": _Family(tied=True, norm_vectors=4, norm_kept=(8, 1)),
    "phi3": _Family(fused=True),
    # the activation of gpt2 is made of elementary operations, each of which keeps an input
    "gpt2": dataclasses.replace(_BIASED, fused=True, positions=1, tied=True, inner_kept=5),
    "gpt_neox": dataclasses.replace(_BIASED, fused=True),
    "opt": dataclasses.replace(_BIASED, positions=3, tied=True, inner_kept=1),  # relu keeps only its output
    "bert": dataclasses.replace(_BIASED, positions=1, tied=True, has_head=False),
}


def from_config(config: Mapping[str, Any] | str | Path, where: str | None = None) -> Shape:
    """Return the model of a Hugging Face configuration: the object, its file, or a folder with config.json."""
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        where = str(path)
        if path.suffix == ".py":
            raise PlanError(f"{path} is a program: pass {path}:NAME, a function in it that returns the module")
        try:
            config = read_mapping(path)
        except FileNotFoundError:
            raise PlanError(f"{path} does not exist: pass a config.json, its folder, or module:name") from None
        except (OSError, ValueError) as error:
            raise PlanError(str(error)) from None
    where = where or "the configuration"
    text = config.get("text_config")
    if isinstance(text, Mapping) and "model_type" in text and str(config.get("model_type")) not in _FAMILIES:
        config = text  # a model of text and images: its language model
    kind = str(config.get("model_type"))
    if kind not in _FAMILIES:
        raise PlanError(
            f"{where}: model_type {kind!r} is not known, expected one of {', '.join(sorted(_FAMILIES))}: pass the model as "
            "module:name (a function that returns it), or --parameters, --layers, --width and --vocabulary"
        )
    return _transformer(kind, _FAMILIES[kind], _Config(config, where))


def _transformer(kind: str, family: _Family, config: _Config) -> Shape:
    layers, width, heads = config.size("layers"), config.size("width"), config.size("heads")
    vocabulary, context = config.size("vocabulary"), config.size("context", 0)
    if min(layers, width, heads, vocabulary) < 1:
        raise PlanError(f"{kind}: layers, width, heads and vocabulary must be at least 1")
    kv_heads = config.size("kv_heads", heads)
    _divides("heads", heads, "kv heads", kv_heads)
    head_width = config.size("head_dim", 0)
    if not head_width:
        _divides("width", width, "heads", heads)
        head_width = width // heads
    inner = config.size("inner", 4 * width if kind == "gpt2" else None) or 4 * width
    experts = config.size("num_local_experts", config.size("num_experts", 0))
    queries, keys = heads * head_width, kv_heads * head_width
    attention_bias = family.bias == "all" or config.flag("attention_bias", False)

    def matrix(rows: int, columns: int, has_bias: bool) -> list[int]:
        return [rows * columns, *([rows] if has_bias else [])]

    qkv_bias = attention_bias or family.bias == "qkv"
    if family.fused:
        attention = matrix(queries + 2 * keys, width, qkv_bias)
    else:
        attention = [each for rows in (queries, keys, keys) for each in matrix(rows, width, qkv_bias)]
    attention += matrix(width, queries, attention_bias)
    mlp_bias = family.bias == "all" or config.flag("mlp_bias", False)

    def mlp(size: int) -> list[int]:
        if family.fused and family.gated:
            ups = matrix(2 * size, width, mlp_bias)
        else:
            ups = matrix(size, width, mlp_bias) * (2 if family.gated else 1)
        return ups + matrix(width, size, mlp_bias)

    norm = [width] * (2 if family.norm_bias else 1)
    norms = norm * family.norm_vectors + ([head_width] * 2 if family.head_norms else [])
    expert_numel, shared_inner = 0, 0
    active = config.size("num_experts_per_tok", 1) if experts else 0
    if experts and not 1 <= active <= experts:
        raise PlanError(f"{kind}: num_experts_per_tok must be 1 to the number of experts, {experts}, got {active}")
    if experts:
        size = config.size("moe_intermediate_size", inner)
        shared_inner = config.size("shared_expert_intermediate_size", 0)
        # transformers keeps the experts of a layer in two tensors: gate and up, down
        body = [experts * width, experts * 2 * size * width, experts * width * size]
        expert_numel, inner = sum(body[1:]), size
        if shared_inner:
            body += mlp(shared_inner) + ([width] if family.scalar_gate else [])
    else:
        body = mlp(inner)
    dense = sum(attention) + sum(body) - expert_numel
    sliced = dense - (experts * width if experts else 0)
    layer = Unit("layer", layers, tuple(attention + body + norms), sliced, expert_numel)
    tied = config.flag("tie_word_embeddings", family.tied)
    outer = [vocabulary * width]
    if family.positions:
        outer.append((context + family.positions - 1) * width)
    if kind == "bert":
        outer += [config.size("type_vocab_size", 2) * width, *norm, *matrix(width, width, True)]
    outer += norm if family.has_head else []
    outer += [] if tied else [vocabulary * width]
    return Shape(
        kind,
        (Unit("outermost", 1, tuple(outer), vocabulary * width * (1 if tied else 2)), layer),
        *(layers, width, heads, kv_heads, head_width, inner, vocabulary, context),
        norm_kept=family.norm_kept,
        inner_kept=family.inner_kept,
        view_of_qkv=family.fused and kind != "gpt2",  # positions turn q and k into new tensors, and v stays a view
        head_norms=family.head_norms,
        has_head=family.has_head,
        experts=experts,
        active=active,
        shared_inner=shared_inner,
    )


def from_module(path: str) -> Shape:
    """Return the model that "module:name" or "file.py:name" builds: a Module, or a callable without arguments."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise PlanError(f"expected module:name, such as train:build_model, got {path!r}")
    import torch

    try:
        with torch.device("meta"):
            found = _import(place)
            for part in name.split("."):
                found = getattr(found, part)
            module = found if isinstance(found, torch.nn.Module) else found()
    except (KeyboardInterrupt, PlanError):
        raise
    except BaseException as error:
        raise PlanError(
            f"{path} cannot be built on the meta device: {type(error).__name__}: {error}; name a function without arguments "
            "that returns the module and reads no weights, or pass --parameters, --layers, --width and --vocabulary"
        ) from None
    if not isinstance(module, torch.nn.Module):
        raise PlanError(f"{path} must be a torch.nn.Module or a function that returns one, got {type(module).__name__}")
    try:
        shape = of_module(module, path)
    except ValueError as error:  # a lazy module
        raise PlanError(f"{path} has a parameter without a shape: {error}") from None
    if not shape.numel:
        raise PlanError(f"{path} has no parameters")
    return shape


def of_module(module: Any, name: str) -> Shape:
    """Return the shape of a torch.nn.Module: its repeated blocks are units, as zero=3 cuts it."""
    from shardwright.layout.param_groups import repeated_blocks

    blocks = repeated_blocks(module)
    inside = {id(p) for block in blocks for p in block.parameters()}
    own = tuple(p.numel() for p in module.parameters() if id(p) not in inside)
    kinds = collections.Counter(tuple(p.numel() for p in block.parameters()) for block in blocks)
    units = [Unit(f"block {k}", count, sizes) for k, (sizes, count) in enumerate(kinds.items())]
    return Shape(name=name, units=(Unit("outermost", 1, own), *units), layers=sum(unit.count for unit in units))


def _import(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(place)
        finally:
            sys.path.remove("")
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None or not Path(place).is_file():
        raise PlanError(f"{place} does not exist: pass file.py:name or module:name")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
