"""The flops of a compiled program's matrix products: products that XLA leaves out do not count."""

import re

from sharding.audit.clock import product_flops
from sharding.audit.hlo import parse


def compiled_flops(text):
    """The flops of a module.

    Loops have to have a known number of turns; of branches the longest one counts.
    """
    module = parse(text)

    def of(name):
        computation = module.computations[name]
        total = 0.0
        for x in computation.values():
            total += product_flops(computation, x) if x.op in ("dot", "convolution") else 0
            inner = [of(called) for names in x.calls.values() for called in names]
            if x.op == "while" and any(inner):
                turns = re.search(r'known_trip_count":\{"n":"(\d+)"', x.attributes)
                assert turns, f"{x.name} turns as often as the data say"
                total += int(turns[1]) * sum(inner)
            else:
                total += max(inner, default=0) if x.op == "conditional" else sum(inner)
        return total

    return of(module.entry)
