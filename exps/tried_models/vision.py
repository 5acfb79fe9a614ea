"""Models of pictures, written as their users write them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exps.tried_models.candidate import Candidate, numbers


class DoubleConv(nn.Sequential):
    """Two convolutions with their norms."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Skips from each level of the way down to the same level of the way up, padded where sizes differ."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 4, 8, 12]
        self.down = nn.ModuleList(map(DoubleConv, widths[:-1], widths[1:]))
        self.middle = DoubleConv(12, 12)
        self.up = nn.ModuleList([DoubleConv(24, 8), DoubleConv(16, 4), DoubleConv(8, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            high, wide = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, [wide // 2, wide - wide // 2, high // 2, high - high // 2])
            x = block(torch.cat([skip, x], dim=1))
        return self.head(x)


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.shortcut = None
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return F.relu(out)


class ResNet(nn.Module):
    """Three levels of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.layers = nn.Sequential(*(self._level(*sizes) for sizes in ((4, 4, 1), (4, 8, 2), (8, 12, 2))))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(12, 5)

    def _level(self, inside: int, outside: int, stride: int) -> nn.Sequential:
        return nn.Sequential(Residual(inside, outside, stride), Residual(outside, outside))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.layers(self.stem(x))), 1))


class DenseNet(nn.Module):
    """Each layer sees the outputs of all before it, in a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4 * (1 + i)), nn.ReLU(), nn.Conv2d(4 * (1 + i), 4, 3, padding=1))
            for i in range(4)
        )
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class Vae(nn.Module):
    """Draws a code, and returns what its loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 4, 4, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 4, 2, 1), nn.ReLU())
        self.mean, self.spread = nn.Linear(32, 4), nn.Linear(32, 4)
        self.widen = nn.Linear(4, 32)
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Sigmoid()
        )

    def reparameterize(self, mean: Tensor, spread: Tensor) -> Tensor:
        deviation = torch.exp(0.5 * spread)
        return mean + torch.randn_like(deviation) * deviation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.flatten(self.encode(x), start_dim=1)
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = self.reparameterize(mean, spread)
        return self.decode(self.widen(code).view(-1, 8, 2, 2)), mean, spread


def elbo(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """The loss of a VAE."""
    picture, mean, spread = output
    apart = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1).mean()
    return F.mse_loss(picture, target) + apart


class Generator(nn.Module):
    """Of a DCGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(True),
            nn.ConvTranspose2d(4, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.main(noise.view(noise.size(0), -1, 1, 1))


class Discriminator(nn.Module):
    """Of a GAN, with spectral norms, whose power iterations change buffers."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(norm(nn.Conv2d(*sizes, 3, 2, 1)) for sizes in ((3, 4), (4, 8), (8, 8)))
        self.head = norm(nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
        return self.head(x.sum([2, 3])).squeeze(1)


def judged(output: Tensor, target: Tensor) -> Tensor:
    """Whether pictures are taken for real."""
    return F.binary_cross_entropy_with_logits(output, target)


class SqueezeExcite(nn.Module):
    """Weighs channels by what all places say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Sequential(nn.Linear(width, 2), nn.ReLU(), nn.Linear(2, width), nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, _, _ = x.size()
        return x * self.gate(self.pool(x).view(batch, channels)).view(batch, channels, 1, 1)


class MobileNet(nn.Module):
    """Depthwise convolutions, with an `if` for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.wide = nn.ModuleList(nn.Conv2d(8, 16, 1) for _ in range(3))
        self.deep = nn.ModuleList(nn.Conv2d(16, 16, 3, 1, 1, groups=16) for _ in range(3))
        self.gates = nn.ModuleList([SqueezeExcite(16), nn.Identity(), SqueezeExcite(16)])
        self.thin = nn.ModuleList(nn.Conv2d(16, 8, 1) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.stem(x))
        for wide, deep, gate, thin in zip(self.wide, self.deep, self.gates, self.thin, strict=True):
            out = thin(gate(F.hardswish(deep(F.hardswish(wide(x))))))
            x = x + out if out.shape == x.shape else out
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class LayerNorm2d(nn.LayerNorm):
    """Over channels, which stand in front."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Blocks with a parameter that scales each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), LayerNorm2d(8))
        self.deep = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(3))
        self.norms = nn.ModuleList(LayerNorm2d(8) for _ in range(3))
        self.mix = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.scales = nn.ParameterList(torch.full((8,), 0.5) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for deep, norm, mix, scale in zip(self.deep, self.norms, self.mix, self.scales, strict=True):
            out = mix(norm(deep(x)).permute(0, 2, 3, 1)) * scale
            x = x + out.permute(0, 3, 1, 2)
        return self.head(x.mean((-2, -1)))


class VisionTransformer(nn.Module):
    """A class token, expanded over the batch, and attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 5, 8))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.attention = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.places
        for norm, attention in zip(self.norms, self.attention, strict=True):
            y = norm(x)
            x = x + attention(y, y, y, need_weights=False)[0]
        return self.head(x[:, 0])


class Mixer(nn.Module):
    """An MLP over places, and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.over_places = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3))
        self.over_channels = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        batch, channels, high, wide = x.shape
        x = x.reshape(batch, channels, high * wide)
        for places, along in zip(self.over_places, self.over_channels, strict=True):
            x = x + places(x)
            x = x + along(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x.mean(-1))


class MaskedConv(nn.Conv2d):
    """Sees only the pixels before its own."""

    mask: Tensor

    def __init__(self, inside: int, outside: int, sees_itself: bool) -> None:
        super().__init__(inside, outside, 3, padding=1)
        mask = torch.ones_like(self.weight)
        mask[:, :, 1, 1 + sees_itself :] = 0
        mask[:, :, 2:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, self.stride, self.padding)


class PixelCnn(nn.Module):
    """Gated masked convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MaskedConv(3, 8, False)
        self.layers = nn.ModuleList(MaskedConv(4, 8, True) for _ in range(3))
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.first(x).chunk(2, dim=1)
        x = torch.tanh(value) * torch.sigmoid(gate)
        for layer in self.layers:
            value, gate = layer(x).chunk(2, dim=1)
            x = x + torch.tanh(value) * torch.sigmoid(gate)
        return self.head(x)


class Denoiser(nn.Module):
    """A diffusion model's U-Net: each block is told the time, as sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down, self.middle, self.up = (nn.Conv2d(*sizes, 3, padding=1) for sizes in ((8, 8), (8, 8), (16, 8)))
        self.tell = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(3))
        self.head = nn.Conv2d(8, 3, 3, padding=1)

    def embedding(self, time: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(4, device=time.device, dtype=time.dtype) / 4)
        angles = time[:, None] * frequencies[None]
        return self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        known = self.embedding(time)
        x = skip = self.stem(x)
        told = [tell(known)[:, :, None, None] for tell in self.tell]
        x = F.avg_pool2d(F.silu(self.norms[0](self.down(x) + told[0])), 2)
        x = x + F.silu(self.norms[1](self.middle(x) + told[1]))
        x = torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], dim=1)
        return self.head(F.silu(self.norms[2](self.up(x) + told[2])))


def candidates() -> dict[str, Candidate]:
    """The models of this file, by name."""
    classes = torch.tensor([0, 4, 2, 1])

    def picture() -> Tensor:
        return numbers(4, 3, 8, 8)

    def classified(make: type[nn.Module]) -> Candidate:
        return Candidate(make, lambda: {"x": picture(), "target": classes}, F.cross_entropy)

    return {
        "U-Net with skips": Candidate(UNet, lambda: {"x": picture(), "target": numbers(4, 1, 8, 8)}, F.mse_loss),
        "ResNet written out": classified(ResNet),
        "DenseNet, a list that grows": classified(DenseNet),
        "VAE": Candidate(Vae, lambda: {"x": picture(), "target": picture()}, elbo),
        "GAN, generator": Candidate(
            Generator, lambda: {"noise": numbers(4, 6), "target": numbers(4, 3, 16, 16)}, F.mse_loss
        ),
        "GAN, discriminator with spectral norm": Candidate(
            Discriminator, lambda: {"x": picture(), "target": torch.ones(4, dtype=torch.float64)}, judged
        ),
        "MobileNet written out": classified(MobileNet),
        "ConvNeXt written out": classified(ConvNext),
        "ViT with nn.MultiheadAttention": classified(VisionTransformer),
        "MLP-Mixer": classified(Mixer),
        "PixelCNN": Candidate(PixelCnn, lambda: {"x": picture(), "target": picture()}, F.mse_loss),
        "diffusion U-Net": Candidate(
            Denoiser, lambda: {"x": picture(), "time": numbers(4), "target": picture()}, F.mse_loss
        ),
    }
