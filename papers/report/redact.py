"""Removes the names of persons and machines from text and records: hosts, users, addresses, folders.

Names of hosts and users are those of this machine; paths of folders are shortened on whichever machine they are. A name
that is also a word of the records, such as a host called gpu, is not removed, because this would change what the
records say.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from harness.base.checkout import ROOT

HOST, USER, HOME, ADDRESS, SECRET = "HOST", "USER", "~", "ADDRESS", "SECRET"
HARMLESS_NAMES = ("localhost", "root", "/", "")  # names that tell nothing about a person or a machine
# Paths in these system folders are not changed. Any other path is cut to its last name or, if it leads into a project
# or a package, to the part within that.
SYSTEM_FOLDERS = "usr|lib|lib64|proc|sys|dev|etc|bin|run|var/run"
HOME_PATH = re.compile(r"/(?:home|Users)/[^/\s'\":]+|/root(?=/)|\b[A-Za-z]:\\+Users\\+[^\\\s'\":]+")
PROJECT_PATH = (
    r"(?:site|dist)-packages/|(?:harness|places|methods|papers|cases|cli|tests|bench)/(?:\w+/)*\w+\.py"
)
FOLDERS_BEFORE_PROJECT = re.compile(rf"(?<![^\s'\",:;=()\[\]{{}}])[^\s'\",:;=()\[\]{{}}]*/(?={PROJECT_PATH})")
OTHER_PATH = re.compile(
    rf"(?<![\w./~-])(?:~|/(?!(?:{SYSTEM_FOLDERS})/)[\w.@+~%=-]+)(?:/[\w.@+~%=-]+)*/([\w.@+~%=-]+)"
)
# Matches a path in quotes that contains blanks.
QUOTED_PATH = re.compile(
    rf"(?<=['\"])/(?!(?:{SYSTEM_FOLDERS})/)(?=[^'\"\n]* )[^'\"\n]*/([^'\"/\n]+)(?=['\"])"
)
ADDRESS_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# Matches the network address of any machine.
NETWORK_ADDRESS = re.compile(
    rf"(?<![\w.:=-])(?!127\.|0\.0\.0\.0)(?:{ADDRESS_BYTE}\.){{3}}{ADDRESS_BYTE}(?![\w.])"
    r"|(?<![\w:.])[0-9a-f]{1,4}(?::[0-9a-f]{0,4}){4,7}(?![\w:])",
    re.IGNORECASE,
)
SECRET_TEXT = re.compile(
    r"\b(?:hf_|gh[a-z]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA)[\w-]{12,}"
    r"|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"
    r"|(?i:(?<=token=)|(?<=token: )|(?<=password=)|(?<=secret=)|(?<=api_key=)|(?<=bearer ))[\w.~+/-]{6,}=*"
)
WORD_PART_BEFORE, WORD_PART_AFTER = re.compile(r"[\w-]*$"), re.compile(r"[\w-]*")
MOST_NODES = 10_000
MOST_WORD_CHARACTERS = 100  # most characters before and after a name that may belong to the same word
GPU_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")


@dataclass(frozen=True)
class Names:
    """The names to replace, each with its replacement. `folders` are replaced wherever they occur in a text. `names`
    are replaced only as whole words, and not where they are part of a word in `known`."""

    names: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    known: frozenset[str] = frozenset()

    def text(self, text: str) -> str:
        """Return the text with the names replaced, and with the paths of all folders shortened."""
        for folder, replacement in _longest_first(self.folders):
            text = re.sub(rf"{re.escape(folder)}(?![\w.-])/?", replacement, text)
        text = HOME_PATH.sub(HOME, SECRET_TEXT.sub(SECRET, text.replace("file:///", "/")))
        text = QUOTED_PATH.sub(r".../\1", NETWORK_ADDRESS.sub(ADDRESS, text))
        text = OTHER_PATH.sub(r".../\1", FOLDERS_BEFORE_PROJECT.sub("", text))
        for word, replacement in _longest_first(self.names):
            domain = r"(?:\.[A-Za-z][\w-]*)*" if replacement == HOST else ""
            whole = rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])"
            text = re.sub(f"({whole}){domain}", partial(self._put, replacement), text, flags=re.IGNORECASE)
        return GPU_UUID.sub(r"\1-removed", text)

    def _put(self, replacement: str, match: re.Match[str]) -> str:
        """Return the replacement `put`; if the match is part of a known word, return the match itself."""
        before = match.string[max(0, match.start(1) - MOST_WORD_CHARACTERS) : match.start(1)]
        after = match.string[match.end(1) : match.end(1) + MOST_WORD_CHARACTERS]
        start, end = WORD_PART_BEFORE.search(before), WORD_PART_AFTER.match(after)
        assert start and end
        return match[0] if f"{start[0]}{match[1]}{end[0]}".lower() in self.known else replacement

    def value(self, value: Any) -> Any:
        """Return the JSON value with the names replaced in every text. The keys of objects are not changed."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list) else value


def _longest_first(names: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(names.items(), key=lambda pair: (-len(pair[0]), pair))


def names_to_remove(known: Iterable[str] = (), others: Iterable[str] = ()) -> Names:
    """Return the names to remove: the names of this machine, its users and this checkout, and the hosts in `others`.
    The words in `known` are not removed."""
    host = socket.gethostname()
    names = {host: HOST, host.partition(".")[0]: HOST, os.uname().nodename: HOST}
    names |= dict.fromkeys(_user_names(), USER) | dict.fromkeys(others, HOST)
    for interface in psutil.net_if_addrs().values():
        addresses = (entry.address.partition("%")[0] for entry in interface)
        names |= {address: ADDRESS for address in addresses if not re.match(r"127\.|::1$|(00:)+00$", address)}
    names = {
        name: replacement
        for name, replacement in names.items()
        if name.lower() not in HARMLESS_NAMES and len(name) > 1
    }
    folders = {str(Path.home()): f"{HOME}/", str(ROOT): ""}
    return Names(names, folders, frozenset(word.lower() for word in known))


def hosts_of_node_list(text: str) -> Iterable[str]:
    """Yield the hosts of a list in Slurm's notation, such as a1,b[2-4,07]. Of each range, yield at most MOST_NODES + 1
    hosts."""
    for before, ranges, after in re.findall(r"([\w.-]+)(?:\[([\d,-]+)\])?([\w.-]*)", text):
        for number_range in ranges.split(","):
            low, _, high = number_range.partition("-")
            if not low:
                yield f"{before}{after}"
            elif len(low) < 10 > len(high):
                for number in range(int(low), min(int(high or low), int(low) + MOST_NODES) + 1):
                    yield f"{before}{number:0{len(low)}d}{after}"


def _user_names() -> set[str]:
    names = {Path.home().name}
    for ask in (getpass.getuser, lambda: pwd.getpwuid(os.getuid()).pw_name):
        with contextlib.suppress(KeyError, OSError):  # the user of a container may have no name
            names.add(ask())
    return names
