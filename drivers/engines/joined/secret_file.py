"""The file with the secret that lets workers join a cluster: only its owner may read it."""

import os
import secrets
import stat
from pathlib import Path

from pippy.drivers.base.errors import ClusterError

DEFAULT_SECRET = "~/.pippy/secret"
_SHORTEST, _LONGEST = 16, 4096  # bytes


def secret_in(path: str | os.PathLike[str]) -> bytes:
    """The secret in a file. Raises ClusterError if there is none, or others can read it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     secret_in(made_secret_file(f"{folder}/secret")) == secret_in(made_secret_file(f"{folder}/secret"))
    True
    """
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            said = opened.read(_LONGEST + 1)
    except FileNotFoundError as error:
        raise ClusterError(
            f"there is no secret file {str(file)!r}; the script makes one where it runs (cluster(n, join=True) prints its "
            "path): copy it to this host, and give its path"
        ) from error
    except OSError as error:
        raise ClusterError(f"the secret file {str(file)!r} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ClusterError(
            f"other accounts can read or change the secret file {str(file)!r}, and who has the secret can run code as you; "
            f"take a new one, with the file gone: cluster(n, join=True) makes it. Or, if nobody has read it: chmod 600 {file}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise ClusterError(
            f"the secret file {str(file)!r} belongs to user {status.st_uid}, who knows the secret; take one of your own"
        )
    secret = said.strip()
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise ClusterError(
            f"the secret file {str(file)!r} has {len(secret)} bytes, where a secret has {_SHORTEST} to {_LONGEST}; remove the "
            "file, and cluster(n, join=True) makes another"
        )
    return secret


def made_secret_file(path: str | os.PathLike[str]) -> Path:
    """The path of a secret file, which is made if it is not there: with 32 random bytes, for its owner alone."""
    file = Path(path).expanduser().absolute()
    if file.exists():
        return file
    made = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as opened:
                opened.write(f"{secrets.token_hex(32)}\n")
            os.link(made, file)  # whole, or another's that was quicker
        except FileExistsError:
            pass
        finally:
            made.unlink()
    except OSError as error:
        raise ClusterError(
            f"the secret file {str(file)!r} cannot be made: {error.strerror}; give another path as secret_file="
        ) from error
    return file
