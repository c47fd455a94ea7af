"""Processes that a host is looked at for, as checks see them."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from kvops.diag.facts.fact import attempt, fact
from kvops.diag.facts.rdma import Port
from kvops.diag.model import Evidence, Unseen
from kvops.diag.parsers import misc, proc
from kvops.host import Sight

if TYPE_CHECKING:
    from kvops.diag.facts.host import HostFacts


class Target:
    """A process to be judged: a store node or an engine."""

    def __init__(self, host: HostFacts, name: str, pid: int) -> None:
        self.host = host
        self.name = name
        self.pid = pid
        self.path = f"/proc/{pid}"
        self.label = f"{name} (pid {pid})"

    def __str__(self) -> str:
        return self.label

    def text(self, name: str, sample: int = 0) -> str:
        return self.host.text(f"{self.path}/{name}", sample)

    def evidence(self, name: str, text: str = "") -> Evidence:
        return self.host.at(f"{self.path}/{name}", text)

    @fact
    def environ(self) -> dict[str, str]:
        return proc.parse_environ(self.text("environ"))

    @fact
    def command_line(self) -> list[str]:
        return proc.parse_nul_list(self.text("cmdline"))

    @fact
    def limits(self) -> dict[str, tuple[int, int]]:
        return proc.parse_limits(self.text("limits"))

    def soft_limit(self, name: str) -> int:
        limit = self.limits.get(name)
        if limit is None:
            raise Unseen(f"{self.path}/limits: {name}", Sight.ABSENT)
        return limit[0]

    @fact
    def status(self) -> dict[str, str]:
        return proc.parse_fields(self.text("status"))

    def has_capability(self, bit: int) -> bool:
        """Whether a capability is effective. Raises Unseen."""
        mask = self.status.get("CapEff", "")
        if not re.fullmatch(r"[0-9a-fA-F]{1,16}", mask):
            raise Unseen(f"{self.path}/status: CapEff", Sight.ABSENT)
        return bool(int(mask, 16) >> bit & 1)

    @fact
    def options(self) -> dict[str, str]:
        """
        ``--name=value`` and ``--name value`` of its command line, joined with its configuration file's
        keys.
        """
        words = self.command_line
        options: dict[str, str] = {}
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                if not equals and not following.startswith("-"):
                    value = following
                options[name.replace("-", "_")] = value
        config = attempt(lambda: self.environ.get("MOONCAKE_CONFIG_PATH")) or options.get("config")
        text = self.host.peek(config) if config and config.startswith("/") else None
        document = attempt(lambda: misc.parse_json(text)) if text else None
        if isinstance(document, dict):
            for key, value in document.items():
                if isinstance(value, str | int | float):
                    options.setdefault(str(key).replace("-", "_"), str(value))
        return options

    def option(self, *names: str) -> str | None:
        """The first of the names that is set; None if none is, or the command line could not be seen."""
        options = attempt(lambda: self.options) or {}
        return next((options[name] for name in names if options.get(name)), None)

    @cached_property
    def protocol(self) -> str | None:
        value = self.option("protocol") or (attempt(lambda: self.environ) or {}).get("MOONCAKE_PROTOCOL")
        return value.lower() if value else None

    @cached_property
    def device_names(self) -> list[str]:
        """RDMA devices it was told to use; empty if it chooses for itself."""
        environ = attempt(lambda: self.environ) or {}
        text = self.option("device_names", "device_name", "devices") or environ.get("MOONCAKE_DEVICE") or ""
        words = [word.strip() for word in text.split(",")]
        return [word for word in words if word and word not in ("auto", "auto-discovery")]

    @cached_property
    def segment_bytes(self) -> int | None:
        expected = self.host.expect_int("segment_bytes")
        text = self.option("global_segment_size", "segment_size", "global_segment_bytes")
        own = attempt(lambda: proc.parse_size(text)) if text else None
        return own if own is not None else expected

    @property
    def wants_huge_pages(self) -> bool:
        environ = attempt(lambda: self.environ) or {}
        return environ.get("MC_STORE_USE_HUGEPAGE", "0").lower() not in ("", "0", "false", "off")

    @cached_property
    def ports(self) -> list[Port]:
        """Ports of the devices it uses."""
        names = self.device_names
        return [port for port in self.host.ports if not names or port.device.name in names]

    @property
    def gid_index(self) -> tuple[int, str] | None:
        """(index, variable) it was told to use; None if it chooses by content. Raises Unseen."""
        for name in ("MC_GID_INDEX", "NCCL_IB_GID_INDEX"):
            value = self.environ.get(name)
            if value is not None and re.fullmatch(r"\d{1,5}", value.strip(), re.ASCII):
                return int(value), name
        return None

    @property
    def destination_affinity(self) -> bool:
        """The variable counts by its presence, whatever its value [M]. Raises Unseen."""
        return "MC_ENABLE_DEST_DEVICE_AFFINITY" in self.environ

    @cached_property
    def log(self) -> tuple[str, str] | None:
        """(path, text) of its log."""
        paths = [f"/var/log/mooncake/{self.name}.log"]
        for number in (2, 1):
            link = self.host.snapshot.readlink(f"{self.path}/fd/{number}")
            if link and link.startswith("/"):
                paths.append(link)
        for path in paths:
            text = self.host.peek(path)
            if text is not None:
                return path, text
        return None
