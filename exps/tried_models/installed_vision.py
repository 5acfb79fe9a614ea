"""Models of torchvision and of timm in small sizes, where these packages can be imported.

A wheel of torchvision that was built for another torch cannot load its operators, and refuses to be imported without them.
Its models are Python, and need none: so the missing ones are declared here before.
"""

import importlib
import importlib.util
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exps.tried_models.candidate import Candidate, numbers

_CLASSES = 5
# By name, with the size of a picture that the model takes.
TORCHVISION = {
    "resnet18": 32, "resnet34": 32, "resnet50": 32, "resnext50_32x4d": 32, "densenet121": 64, "squeezenet1_0": 48,
    "squeezenet1_1": 48, "mobilenet_v2": 32, "mobilenet_v3_small": 32, "mobilenet_v3_large": 32, "mnasnet0_5": 32,
    "mnasnet1_0": 32, "shufflenet_v2_x0_5": 32, "shufflenet_v2_x1_0": 32, "efficientnet_b0": 32, "efficientnet_v2_s": 32,
    "regnet_y_400mf": 32, "regnet_x_400mf": 32, "regnet_x_800mf": 32, "convnext_tiny": 32, "googlenet": 32,
    "inception_v3": 75, "swin_t": 32, "swin_v2_t": 32,
}  # fmt: skip
TIMM = {
    "resnet10t": 32, "resnet18d": 32, "resnetv2_50": 32, "seresnet18": 32, "ecaresnet26t": 64, "res2net50_14w_8s": 32,
    "densenet121": 64, "dpn48b": 32, "efficientnet_lite0": 32, "mobilenetv3_small_050": 32, "mobilenetv4_conv_small_035": 32,
    "ghostnet_050": 32, "hardcorenas_a": 32, "regnetx_002": 32, "convnext_atto": 32, "convnextv2_atto": 32,
    "vit_tiny_patch16_224": 32, "deit_tiny_patch16_224": 32, "edgenext_xx_small": 64, "mixer_s32_224": 32,
    "resmlp_12_224": 32, "poolformer_s12": 32, "mobilevit_xxs": 64, "efficientformer_l1": 224,
}  # fmt: skip
_OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 4},
    "deit_tiny_patch16_224": {"img_size": 32, "depth": 4},
    "mixer_s32_224": {"img_size": 32},
    "resmlp_12_224": {"img_size": 32},
}


def declare_missing_operators() -> None:
    """Declare those operators of torchvision for which it registers a fake when it is imported. They cannot be called."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    for name in re.findall(r'register_fake\("torchvision::(\w+)"\)', text):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "() -> ()")


def _arguments(size: int) -> dict[str, Tensor]:
    return {"x": numbers(2, 3, size, size), "target": torch.tensor([1, 3])}


def _torchvision(name: str) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    return models.get_model(name, weights=None, num_classes=_CLASSES, **_OWN_OPTIONS.get(name, {}))


def _timm(name: str) -> nn.Module:
    timm = importlib.import_module("timm")
    return timm.create_model(name, num_classes=_CLASSES, **_OWN_OPTIONS.get(name, {}))


def _candidates(sizes: Iterable[tuple[str, int]], make: Any) -> dict[str, Candidate]:
    return {name: Candidate(partial(make, name), partial(_arguments, size), F.cross_entropy) for name, size in sizes}


def torchvision_candidates() -> dict[str, Candidate]:
    """The models of torchvision, by name."""
    return _candidates(TORCHVISION.items(), _torchvision)


def timm_candidates() -> dict[str, Candidate]:
    """The models of timm, by name."""
    return _candidates(TIMM.items(), _timm)
