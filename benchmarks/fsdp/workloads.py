"""Models and data, the same for every engine: plain torch modules that return their loss.

A model is built on the meta device and filled part by part, so that a rank never holds much more
than it keeps. B batch, T time, H hidden, N heads, D head dimension, C channels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Tensors = tuple[torch.Tensor, ...]


class Model(nn.Module):
    """A chain of `layers`, each a unit, and what is around them: the root. Returns its loss."""

    layers: nn.ModuleList


@dataclass(frozen=True)
class Workload:
    """A model and the batch that one rank trains on.

    Attributes:
        model: makes the model, on the meta device.
        batch: makes the inputs of one rank on a device, from that rank's generator.
        about: sizes, for people.
        steps: how many to time, unless told otherwise.
    """

    model: Callable[[], Model]
    batch: Callable[[torch.device, torch.Generator], Tensors]
    about: str
    steps: int


@torch.no_grad()
def materialise(module: nn.Module, device: torch.device, seed: int) -> None:
    """Give every parameter in `module` that is still on the meta device memory and a value.

    Matrices are normal with a variance of one over the fan-in, vectors one (weights of norms) or
    zero (biases). Values are bf16 numbers held in float32: engines that start from bf16 weights
    then start from the same ones.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for each in module.modules():
        own = {name: p for name, p in each._parameters.items() if p is not None and p.is_meta}
        if not own:
            continue
        each.to_empty(device=device, recurse=False)
        for name in own:
            parameter = each.get_parameter(name)
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name == "bias" else 1.0)
                continue
            fan_in = parameter[0].numel()
            parameter.normal_(0.0, fan_in**-0.5, generator=generator)
            parameter.copy_(parameter.bfloat16())


# ---- decoder


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder and its microbatch."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    seq: int
    batch: int


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021) of [B, T, N, D], tables [T, 1, D].

    Halves are paired. Saves only the tables for backward.
    """
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Block(nn.Module):
    """Pre-norm attention with RoPE, then pre-norm SwiGLU.

    Kept for backward, in units of B*T*H bf16 numbers: two residual streams, two normed inputs
    (`F.rms_norm` is one kernel on CUDA where weight and input have one dtype: it saves its input,
    which is kept anyway, and one float32 a row), q, k, v, the attention's output, and four of
    ffn / H: gate, up, silu(gate), and their product.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attn_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.wq = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.wk = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.wv = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.wo = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        normed = self.attn_norm(x)
        q, k, v = (w(normed).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(Model):
    """Tokens to mean cross entropy; embedding and head are not tied."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """int64 [B, T] twice, and RoPE's tables [T, 1, D] -> float32 scalar."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def decoder(shape: DecoderShape, steps: int) -> Workload:
    """A decoder on random tokens. RoPE's tables are inputs, in bf16, so no engine casts them."""

    def batch(device: torch.device, generator: torch.Generator) -> Tensors:
        tokens = torch.randint(
            shape.vocab, (shape.batch, shape.seq + 1), device=device, generator=generator
        )
        half = shape.hidden // shape.heads // 2
        exponents = torch.arange(half, device=device, dtype=torch.float32) / half
        angles = torch.arange(shape.seq, device=device)[:, None] * 10_000.0**-exponents
        tables = torch.cat((angles, angles), dim=-1)[:, None]
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return inputs, targets, tables.cos().bfloat16(), tables.sin().bfloat16()

    about = (
        f"decoder, hidden {shape.hidden}, {shape.layers} layers, FFN {shape.ffn}, "
        f"{shape.heads} heads, vocabulary {shape.vocab}, {shape.batch} x {shape.seq} tokens"
    )
    return Workload(lambda: Decoder(shape), batch, about, steps)


# ---- linear layers


class Stack(Model):
    """A chain of layers of one width whose mean square is the loss; the root owns nothing."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] -> float32 scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class GeluLinear(nn.Module):
    """x + gelu(linear(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] -> [rows, width]."""
        return x + F.gelu(self.linear(x))


def stack(
    layer: Callable[[int], nn.Module], width: int, layers: int, rows: int, steps: int
) -> Workload:
    """`layers` layers of one width over `rows` rows."""

    def batch(device: torch.device, generator: torch.Generator) -> Tensors:
        return (torch.randn(rows, width, device=device, generator=generator).bfloat16(),)

    about = f"{layers} Linear({width}), {rows} rows"
    return Workload(lambda: Stack([layer(width) for _ in range(layers)]), batch, about, steps)


def plain_linear(width: int) -> nn.Module:
    """A square linear layer without bias."""
    return nn.Linear(width, width, bias=False)


# ---- convolutions


class ResidualBlock(nn.Module):
    """Pre-activation residual block (He et al., 2016); its group norms keep no statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, height, width] -> the same."""
        out = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(out)))


class ConvNet(Model):
    """Stem, residual blocks, mean pooling and a classifier of ten classes."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(ResidualBlock(channels) for _ in range(layers))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, 3, height, width], int64 [B] -> float32 scalar."""
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


def cnn(channels: int, layers: int, images: int, side: int, steps: int) -> Workload:
    """A residual network on random images."""

    def batch(device: torch.device, generator: torch.Generator) -> Tensors:
        size = (images, 3, side, side)
        pixels = torch.randn(size, device=device, generator=generator).bfloat16()
        return pixels, torch.randint(10, (images,), device=device, generator=generator)

    about = f"{layers} residual blocks of {channels} channels, {images} images of {side}x{side}"
    return Workload(lambda: ConvNet(channels, layers), batch, about, steps)


# ---- the catalogue

FULL: dict[str, Workload] = {
    "stack": stack(plain_linear, 1024, 16, 64, steps=50),
    "decoder": decoder(DecoderShape(32_000, 4096, 16, 32, 11_008, 4096, 2), steps=10),
    # Layers too small to hide what they gather and reduce.
    "thin": decoder(DecoderShape(32_000, 2048, 32, 16, 5632, 1024, 1), steps=20),
    "linear": stack(GeluLinear, 8192, 6, 8192, steps=20),
    "cnn": cnn(256, 8, 64, 32, steps=20),
    "transformer": decoder(DecoderShape(8192, 1024, 8, 16, 2816, 1024, 4), steps=20),
}

TINY: dict[str, Workload] = {
    "stack": stack(plain_linear, 32, 4, 8, steps=5),
    "decoder": decoder(DecoderShape(64, 32, 3, 2, 48, 16, 2), steps=5),
    "thin": decoder(DecoderShape(64, 16, 4, 2, 24, 8, 1), steps=5),
    "linear": stack(GeluLinear, 64, 3, 16, steps=5),
    "cnn": cnn(16, 2, 4, 8, steps=5),
    "transformer": decoder(DecoderShape(48, 16, 2, 2, 32, 8, 2), steps=5),
}
"""The same models in sizes for a laptop: they test the flow, their times say nothing."""
