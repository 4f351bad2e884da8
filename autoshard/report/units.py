"""Numbers for people: three significant digits, with the unit that keeps them short."""

from __future__ import annotations


def _scaled(value: float, units: tuple[str, ...], step: float) -> str:
    unit, *larger = units
    while larger and abs(value) >= step * 0.9995:  # 0.9995: 999.96 k reads "1 M", never "1000 k"
        value, (unit, *larger) = value / step, larger
    text = f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return f"{text} {unit}".rstrip()


def duration(seconds: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 1:
        return _scaled(seconds * 1e6, ("us", "ms", "s"), 1000)
    if abs(seconds) < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if abs(seconds) < 7200 else f"{seconds / 3600:.3g} h"


def size(nbytes: float) -> str:
    """``1610612736`` -> ``1.5 GiB``."""
    return _scaled(nbytes, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def count(number: float) -> str:
    """``124439808`` -> ``124 M``; numbers below 10 000 are written out."""
    return f"{number:.0f}" if number < 10_000 else _scaled(number, ("", "k", "M", "G", "T", "P"), 1000)


def percent(share: float) -> str:
    """``0.1234`` -> ``12.3 %``."""
    return f"{100 * share:.1f} %"
