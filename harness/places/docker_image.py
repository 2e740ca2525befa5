"""The verb `image`: build the image that --on docker runs jobs in, and open a shell in it."""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO

import click

from harness.core.method import ROOT, Unavailable
from harness.places.docker import Docker, default_image, engine, told

PINS = ("venv.sh", "pyproject.toml", "constraints.txt")
PARTS = (
    *PINS, "run.sh", "test.sh", "machines.yaml", "models.yaml", "README.md", "ARTIFACT.md", "CONTRIBUTING.md",
    "CITATION.cff", "docs", "harness", "methods", "cases", "claims", "bench", "tests", "notebooks",
)  # fmt: skip
device_option = click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="PyTorch's build.")
name_option = click.option(
    "--image", "name", metavar="NAME", help="Its name; default: of its pins, as --on docker asks."
)


@click.group(invoke_without_command=True)
@click.pass_context
def image(context: click.Context) -> None:
    """The image that --on docker runs jobs in."""
    if context.invoked_subcommand is None:
        raise ValueError("expected image build or image shell, got image; try ./run.sh image build")


@image.command()
@device_option
@name_option
@click.option("--base", metavar="IMAGE", help="Debian with Python 3.11 or newer; default: as docker/Dockerfile says.")
@click.option("--wheelhouse", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Folder of all wheels, for machines without network: pip wheel -w DIR makes one.")  # fmt: skip
@click.option("--build-arg", "given", multiple=True, metavar="NAME=VALUE", help="Another one of docker/Dockerfile.")
def build(device: str, name: str | None, base: str | None, wheelhouse: Path | None, given: tuple[str, ...]) -> None:
    """Build it from docker/Dockerfile, on the pinned dependencies; once, some minutes."""
    client, name = engine(), name or default_image(device)
    values = dict(text.partition("=")[::2] for text in given) | {"DEVICE": device}
    from docker.errors import APIError

    with tempfile.TemporaryFile() as context:
        pack(context, wheelhouse)
        context.seek(0)
        try:
            lines = client.api.build(
                fileobj=context, custom_context=True, dockerfile="Dockerfile", tag=name, rm=True, decode=True,
                buildargs=values | ({"BASE": base} if base else {}), network_mode="host",
            )  # fmt: skip
            for line in lines:
                if "error" in line:
                    error = " ".join(line["error"].split())
                    raise Unavailable(f"the image was not built: {error}; --build-arg and --base change it")
                if text := line.get("stream", "").rstrip():
                    print(text, flush=True)
        except APIError as error:
            raise Unavailable(f"the image was not built: {told(error)}") from error
    size = client.images.get(name).attrs["Size"]
    print(f"{name}: {size / 1e9:.2f} GB; the same job in it: ./run.sh -m METHOD --on docker")


def pack(context: IO[bytes], wheelhouse: Path | None) -> None:
    """Write the tar that docker/Dockerfile copies from: pins, wheels, and the project's own files."""
    with tarfile.open(fileobj=context, mode="w") as archive:
        archive.add(ROOT / "docker" / "Dockerfile", "Dockerfile")
        for name in PINS:
            archive.add(ROOT / name, name)
        for name in PARTS:
            if (ROOT / name).exists():
                archive.add(ROOT / name, f"project/{name}", filter=_plain)
        if wheelhouse:
            archive.add(wheelhouse, "wheelhouse")


@image.command()
@device_option
@name_option
def shell(device: str, name: str | None) -> None:
    """A shell in it, with this folder of results; without network."""
    place = Docker(name or default_image(device))
    if not sys.stdin.isatty():
        raise ValueError("image shell needs a terminal")
    words = ["docker", "run", "--rm", "-it", "--network", "none", "--user", f"{os.getuid()}:{os.getgid()}"]
    words += ["--gpus", "all"] if device == "cuda" else []
    try:
        os.execvp("docker", [*words, "-v", f"{ROOT / 'results'}:/harness/results", place.image.id, "bash"])
    except OSError as error:
        raise Unavailable("image shell needs docker's own command beside its engine") from error


def _plain(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out caches and environments, and the owner of a file."""
    if Path(item.name).name in ("__pycache__", ".venv"):
        return None
    item.uid = item.gid = 1000
    item.uname = item.gname = ""
    return item
