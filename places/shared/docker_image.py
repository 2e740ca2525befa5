"""The verb `image`: builds the image that --on docker runs jobs in, saves and loads it, and opens a shell in it."""

from __future__ import annotations

import os
import re
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Any

import click

from harness.base.checkout import ROOT
from harness.base.whole_file import check_replaceable
from harness.core.method import Unavailable
from places.docker import Docker, default_image, engine, engine_error
from places.shared import container_user

# pattern of color codes, with which the engine marks text that a step of the build printed to standard error
COLOR = re.compile(r"\x1b\[\d+m")
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="PyTorch's device."
)
name_option = click.option(
    "--image", "name", metavar="NAME", help="Name of the image; default: the name that --on docker uses."
)


@click.group(invoke_without_command=True)
@click.pass_context
def image(context: click.Context) -> None:
    """The image that --on docker runs jobs in."""
    if context.invoked_subcommand is None:
        raise ValueError("expected image build, save, load or shell, got image; try ./run.sh image build")


@image.command()
@device_option
@name_option
@click.option(
    "--base",
    metavar="IMAGE",
    help="Base image, a Debian with Python 3.11 or newer; default: the base image in docker/Dockerfile.",
)
@click.option(
    "--wheelhouse",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Install from the wheels in this folder, without network; pip wheel -w DIR makes them.",
)
@click.option(
    "--build-arg",
    "build_arg_texts",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an ARG of docker/Dockerfile.",
)
def build(
    device: str, name: str | None, base: str | None, wheelhouse: Path | None, build_arg_texts: tuple[str, ...]
) -> None:
    """Build the image from docker/Dockerfile with the pinned dependencies. The build takes some minutes."""
    client, name = engine(), name or default_image(device)
    build_arguments = dict(text.partition("=")[::2] for text in build_arg_texts) | {"DEVICE": device}
    from docker.errors import APIError

    with tempfile.TemporaryFile() as context:
        pack(context, wheelhouse)
        context.seek(0)
        try:
            lines = client.api.build(
                fileobj=context,
                custom_context=True,
                dockerfile="docker/Dockerfile",
                tag=name,
                rm=True,
                decode=True,
                buildargs=build_arguments | ({"BASE": base} if base else {}),
                network_mode="host",
            )
            for line in lines:
                if "error" in line:
                    error = " ".join(line["error"].split())
                    raise Unavailable(f"the image was not built: {error}; try another --build-arg or --base")
                if text := COLOR.sub("", line.get("stream", "")).rstrip():
                    print(text, flush=True)
        except APIError as error:
            raise Unavailable(f"the image was not built: {engine_error(error)}") from error
    size = client.images.get(name).attrs["Size"]
    print(f"{name}: {size / 1e9:.2f} GB; the same job in it: ./run.sh -m METHOD --on docker")


def pack(context: IO[bytes], wheelhouse: Path | None) -> None:
    """Write the build context of `docker build -f docker/Dockerfile .` as a tar archive: the files of the checkout that
    .dockerignore does not exclude, and the folder of wheels, if there is one."""
    from docker.utils.build import exclude_paths

    patterns = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name in sorted(exclude_paths(ROOT, patterns)):
            archive.add(ROOT / name, name, recursive=False, filter=_without_owner)
        if wheelhouse:
            archive.add(wheelhouse, "wheelhouse", filter=_without_owner)


@image.command()
@device_option
@name_option
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def save(device: str, name: str | None, file: Path) -> None:
    """Write the image to a tar file, for machines that cannot build it."""
    name = name or default_image(device)
    engine_without_time_limit()
    image = Docker(name).image
    check_replaceable(file)
    partial_file = file.with_name(f".{file.name}.part")
    try:
        with open(partial_file, "wb") as stream:
            stream.writelines(image.save(named=name))
        partial_file.replace(file)
    finally:
        partial_file.unlink(missing_ok=True)
    print(f"{name}: {file.stat().st_size / 1e9:.2f} GB; on another machine: ./run.sh image load {file.name}")


@image.command()
@click.argument("file", type=click.File("rb"))
def load(file: IO[bytes]) -> None:
    """Load an image from a file that `image save` wrote."""
    from docker.errors import APIError, ImageLoadError

    try:
        (image,) = engine_without_time_limit().images.load(file)
    except (APIError, ImageLoadError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ValueError(
            f"expected a file that ./run.sh image save wrote, got {file.name}: {text}"
        ) from error
    print(f"loaded {', '.join(image.tags)}")


@image.command()
@device_option
@name_option
def shell(device: str, name: str | None) -> None:
    """Open a shell in the image. It sees this checkout's folder of results, has no network, and never runs as root."""
    place = Docker(name or default_image(device))
    if not sys.stdin.isatty():
        raise ValueError("image shell: expected a terminal as standard input, got none")
    container_user.make_writable(ROOT / "results")
    user, group = container_user.ids()
    command = ["docker", "run", "--rm", "-it", "--network", "none", "--user", f"{user}:{group}"]
    command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    command += ["--gpus", "all"] if device == "cuda" else []
    try:
        os.execvp("docker", [*command, "-v", f"{ROOT / 'results'}:/harness/results", place.image.id, "bash"])
    except OSError as error:
        raise Unavailable("image shell needs the command docker, not only Docker's engine") from error


def engine_without_time_limit() -> Any:
    """Return the engine's client with no limit of time, because the engine takes minutes to pack an image of several
    gigabytes."""
    client = engine()
    client.api.timeout = None
    return client


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an archive's entry without the file's owner, as the command docker build does."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
