"""The lever `Network` over containers: rules in the consumer's and the producer's network namespaces.

An engine's container has no right to change its network. A short-lived container with `NET_ADMIN` joins its namespace,
makes the change, and is gone; the rules stay. They name the other side's address, so that a harness and a proxy, which
have others, still get through.
"""

from __future__ import annotations

from collections.abc import Callable

from faults.levers import LeverError
from harness.targets.workload import CONSUMER, PRODUCER

# Runs a script in the network namespace of a side's container, as root, and gives what it printed. Raises LeverError.
RunIn = Callable[[str, str], str]

_CHAIN = "kvchaos"
_UNLIMITED = "10gbit"
_DELAY_MS = 20


_DROP = "-j DROP"
# A RST has to get through, also the one that the rule itself has made.
_RESET = "-p tcp ! --tcp-flags RST RST -j REJECT --reject-with tcp-reset"


def filter_script(peer: str, rule: str) -> str:
    """All packets from and to `peer` meet an iptables rule."""
    return f"""set -e
iptables -w -N {_CHAIN}
iptables -w -A {_CHAIN} {rule}
iptables -w -I INPUT -s {peer} -j {_CHAIN}
iptables -w -I OUTPUT -d {peer} -j {_CHAIN}
"""


def shape_script(peer: str, kbit_s: int) -> str:
    """What goes to `peer` is limited; prints which queueing discipline does it. All else passes as before."""
    netem = f"netem delay {_DELAY_MS}ms rate {kbit_s}kbit"
    tbf = f"tbf rate {kbit_s}kbit burst 4kb latency 60s"
    return f"""set -e
dev=$(ip -o -4 route get {peer} | sed -n 's/.* dev \\([^ ]*\\).*/\\1/p')
tc qdisc add dev $dev root handle 1: htb default 1
tc class add dev $dev parent 1: classid 1:1 htb rate {_UNLIMITED}
tc class add dev $dev parent 1: classid 1:2 htb rate {_UNLIMITED}
tc filter add dev $dev parent 1: protocol ip u32 match ip dst {peer}/32 flowid 1:2
if tc qdisc add dev $dev parent 1:2 handle 20: {netem} 2>/dev/null; then echo {netem}
else tc qdisc add dev $dev parent 1:2 handle 20: {tbf}; echo {tbf}; fi
"""


HEAL = f"""
iptables -w -D INPUT $(iptables -w -S INPUT | sed -n 's/^-A INPUT \\(.*-j {_CHAIN}\\)$/\\1/p') 2>/dev/null
iptables -w -D OUTPUT $(iptables -w -S OUTPUT | sed -n 's/^-A OUTPUT \\(.*-j {_CHAIN}\\)$/\\1/p') 2>/dev/null
iptables -w -F {_CHAIN} 2>/dev/null
iptables -w -X {_CHAIN} 2>/dev/null
for dev in $(ls /sys/class/net); do tc qdisc del dev $dev root 2>/dev/null; done
true
"""
COUNT_FILTERED = f"iptables -w -L {_CHAIN} -n -v -x | awk 'NR > 2 {{ sum += $1 }} END {{ print sum + 0 }}'"
# tbf counts packets that had to wait as overlimits; all that passed netem has waited.
COUNT_SHAPED = """for dev in $(ls /sys/class/net); do tc -s qdisc show dev $dev; done | awk '
/^qdisc/ { kind = ($3 == "20:") ? $2 : "" }
kind == "netem" && /Sent/ { print $4 }
kind == "tbf" && /overlimits/ { gsub(",", ""); for (i = 1; i < NF; i++) if ($i == "overlimits") print $(i + 1) }
' | head -n 1"""


class ContainerNetwork:
    """One change at a time. `address` gives a side's address as it is now."""

    def __init__(self, run_in: RunIn, address: Callable[[str], str]) -> None:
        self._run_in = run_in
        self._address = address
        self._where: str | None = None
        self._count = ""

    def cut(self) -> str:
        return self._filter(_DROP)

    def reset(self) -> str:
        return self._filter(_RESET)

    def slow(self, kbit_s: int) -> str:
        self._begin(PRODUCER, COUNT_SHAPED)
        return self._run_in(PRODUCER, shape_script(self._address(CONSUMER), kbit_s)).strip()

    def touched(self) -> int:
        if self._where is None:
            return 0
        printed = self._run_in(self._where, self._count).strip()
        if not printed.isdigit():
            raise LeverError(f"packets on the {self._where}'s link are not counted: {printed!r}")
        return int(printed)

    def heal(self) -> None:
        where, self._where = self._where, None
        if where is not None:
            self._run_in(where, HEAL)

    def forget(self, side: str) -> None:
        """The side's container has ended, and its network namespace with what was done there."""
        if self._where == side:
            self._where = None

    def _filter(self, rule: str) -> str:
        self._begin(CONSUMER, COUNT_FILTERED)
        self._run_in(CONSUMER, filter_script(self._address(PRODUCER), rule))
        return f"iptables {rule}, at D"

    def _begin(self, where: str, count: str) -> None:
        if self._where is not None:
            raise LeverError("the link has been changed already: heal it first")
        self._where, self._count = where, count
