"""Manifests of checkpoints as earlier versions wrote them, and as whoever writes a file can write them."""

import hashlib
import json


def content_of(path):
    """What a checkpoint's manifest says, without the hash."""
    content = json.loads((path / "checkpoint.json").read_bytes())
    content.pop("hash", None)
    return content


def text_of(content, version=2, change=lambda text: text):
    """The bytes of a manifest; ``change`` makes others of them. That of version 2 has the right hash, whatever it says."""
    text = change(json.dumps({**content, "version": version} if version else content, indent=1).encode())
    if version == 1:
        return text
    return text.removesuffix(b"\n}") + f',\n "hash": "{hashlib.sha256(text).hexdigest()}"\n}}'.encode()


def rewrite(path, change, version=2):
    """Change what a manifest says. With ``version`` None, that is what the change makes of it."""
    content = content_of(path)
    change(content)
    (path / "checkpoint.json").write_bytes(text_of(content, version))
