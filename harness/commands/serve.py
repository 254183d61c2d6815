"""`kvchaos serve`: an engine or the P/D proxy as a server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from engine.checksum.policy import TRIGGERS
from engine.config import KERNEL_BLOCK_SPLITS, PARALLEL_SIZES, PRESETS, EngineConfig, preset
from engine.errors import InputError

if TYPE_CHECKING:
    from engine.checksum.policy import ChecksumSettings
    from harness.overhead.planted_delay import PlantedDelay

_DEFAULT_LEASE_MS = 30_000


def _address(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    from harness.control import control_token

    control_token()
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise InputError(f"--control {text}: use HOST:PORT")
    return host, int(port)


def _peers(values: tuple[str, ...]) -> dict[str, str]:
    peers = {}
    for value in values:
        engine_id, found, url = value.partition("=")
        if not engine_id or not found or not _is_url(url):
            raise InputError(f"--peer {value}: use ID=URL, such as producer=http://127.0.0.1:8100")
        peers[engine_id] = url
    return peers


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _planted(role: str, text: str | None, control: object, checksum: ChecksumSettings) -> PlantedDelay | None:
    """Only on a producer that already says that it is one of a study: nobody gets it by a slip."""
    if text is None:
        return None
    from harness.overhead.planted_delay import parse_delay

    planted = parse_delay(text)
    if role != "producer" or not checksum.allow_checksum_switch or control is not None:
        raise InputError(
            "--plant-delay: only on a producer of a study: with --role producer and --allow-checksum-switch, "
            "without --control"
        )
    return planted


host_option = click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; loopback unless told otherwise."
)
port_option = click.option(
    "--port", type=click.IntRange(0, 65535), required=True, help="0: any free one; the log says which."
)
control_option = click.option(
    "--control",
    metavar="HOST:PORT",
    help="Let a harness inject faults through this address. Needs KVCHAOS_CONTROL_TOKEN. Never in production.",
)


drain_option = click.option(
    "--drain-ms",
    type=click.IntRange(0, 3_600_000),
    default=3000,
    show_default=True,
    help="How long a signal lets requests finish before they end with an error.",
)


@click.group()
def serve() -> None:
    """Run an engine or the P/D proxy as an OpenAI-compatible server."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


@serve.command()
@click.option("--role", type=click.Choice(["producer", "consumer"]), required=True, help="Names the engine by default.")
@click.option("--id", "engine_id", help="The engine's id, by which others read from it. Default: its role.")
@host_option
@port_option
@click.option("--peer", "peers", multiple=True, metavar="ID=URL", help="An engine to read KV from; may be given again.")
@click.option("--model", type=click.Choice(sorted(PRESETS)), default="tiny", show_default=True)
@click.option("--tp-size", type=click.Choice(PARALLEL_SIZES), default=1, show_default=True, help="Ranks of a stage.")
@click.option("--pp-size", type=click.Choice(PARALLEL_SIZES), default=1, show_default=True, help="Stages.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the weights.")
@click.option("--block-size", type=click.IntRange(1, 1024), default=16, show_default=True)
@click.option(
    "--kernel-block-splits",
    type=click.Choice(KERNEL_BLOCK_SPLITS),
    default=1,
    show_default=True,
    help="Kernel blocks that a block lies in.",
)
@click.option("--num-blocks", type=click.IntRange(2, 1_000_000), default=256, show_default=True)
@click.option("--layout", type=click.Choice(["HND", "NHD"]), default="HND", show_default=True)
@click.option("--kv-dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--max-model-len", type=click.IntRange(1), help="Default: what the blocks hold.")
@click.option("--max-batched-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--max-num-seqs", type=click.IntRange(1), default=16, show_default=True)
@click.option("--steps-in-flight", type=click.IntRange(1, 8), default=2, show_default=True)
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@click.option("--lease-ms", type=click.IntRange(1), default=_DEFAULT_LEASE_MS, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--kv-checksum-mode", type=click.Choice(["off", "log", "enforce"]), default="log", show_default=True)
@click.option(
    "--kv-checksum-version",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="What a producer sends: 1, or 2 (hardened). A consumer reads both.",
)
@click.option(
    "--kv-checksum-trigger",
    type=click.Choice(TRIGGERS),
    default="prompt_end",
    show_default=True,
    help="When a producer sums: docs/overhead.md says which is for what.",
)
@click.option(
    "--allow-checksum-switch",
    is_flag=True,
    help="A request may say kv_checksum: false, and is then neither summed nor compared. For studies.",
)
@click.option(
    "--plant-delay",
    metavar="50ms|5%",
    help="Delay the first token of requests that are summed, by so much or by so much of their time. For studies.",
)
@click.option("--kv-load-failure-policy", type=click.Choice(["fail", "recompute"]), default="fail", show_default=True)
@click.option(
    "--load-timeout-ms", type=click.IntRange(1), default=120_000, show_default=True, help="Then the request fails."
)
@click.option(
    "--heartbeat-ms",
    type=click.IntRange(0),
    default=5000,
    show_default=True,
    help="How often a read that goes on renews its lease; 0: never.",
)
@drain_option
@control_option
def engine(role: str, engine_id: str | None, host: str, port: int, peers: tuple[str, ...], **options: Any) -> None:
    """Serve one engine: /v1/completions with streaming, /health, /metrics. KV moves through NIXL."""
    from engine.checksum.policy import ChecksumSettings
    from engine.connectors.nixl import NixlPatience
    from harness.serve import ServeOptions, serve_engine

    control, drain_s = _address(options.pop("control")), options.pop("drain_ms") / 1000
    patience = NixlPatience(
        read_s=options.pop("load_timeout_ms") / 1000, heartbeat_s=options.pop("heartbeat_ms") / 1000
    )
    checksum = ChecksumSettings(
        kv_checksum_mode=options.pop("kv_checksum_mode"),
        kv_load_failure_policy=options.pop("kv_load_failure_policy"),
        allow_checksum_switch=options.pop("allow_checksum_switch"),
        kv_checksum_version=options.pop("kv_checksum_version"),
        kv_checksum_trigger=options.pop("kv_checksum_trigger"),
    )
    planted = _planted(role, options.pop("plant_delay"), control, checksum)
    model, lease = preset(options.pop("model")), options.pop("lease_ms")
    config = EngineConfig(engine_id or role, model, checksum=checksum, lease_ticks=lease, **options)
    serve_engine(config, ServeOptions(host, port, control, _peers(peers), patience, drain_s, planted))


@serve.command()
@click.option("--producer", required=True, metavar="URL", help="Where prompts are prefilled.")
@click.option("--consumer", required=True, metavar="URL", help="Where they are decoded.")
@host_option
@port_option
@drain_option
@control_option
def proxy(producer: str, consumer: str, host: str, port: int, drain_ms: int, control: str | None) -> None:
    """Serve the proxy that sends a prompt to the producer and then, with what it answered, to the consumer."""
    from harness.serve import ServeOptions, serve_proxy

    for name, url in (("--producer", producer), ("--consumer", consumer)):
        if not _is_url(url):
            raise InputError(f"{name} {url}: use a URL, such as http://127.0.0.1:8100")
    serve_proxy(producer, consumer, ServeOptions(host, port, _address(control), drain_s=drain_ms / 1000))
