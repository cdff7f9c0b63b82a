#!/usr/bin/env python3
"""Draws a trace of `weft bench exec --trace` or `weft run --trace` as SVG: tools/trace_picture.py TRACE OUT [SCOPE].

The last step of the trace, a row per thread; with SCOPE only the nodes whose names begin with it ("layers.3.self_attn")."""
import json
import sys

WIDTH, ROW, LEFT, TOP = 1100, 34, 70, 40
COLOURS = {"gemm": "#4c78a8", "experts": "#9c755f", "kda": "#54a24b", "attention": "#e45756", "index": "#f58518",
           "index_key": "#ffbf79", "norm": "#b279a2", "mix": "#72b7b2", "latent": "#ff9da6", "route": "#bab0ac"}


def last_step(bars):
    """Bars of the last run of the graph: a step begins where its first node does."""
    first = bars[0]["args"]["node"]
    starts = [b["ts"] for b in bars if b["args"]["node"] == first]
    return [b for b in bars if b["ts"] >= starts[-1]]


def picture(bars, title):
    begin = min(b["ts"] for b in bars)
    end = max(b["ts"] + b["dur"] for b in bars)
    threads = max(b["tid"] for b in bars) + 1
    ops = []
    for b in bars:
        if b["name"] not in ops:
            ops.append(b["name"])
    scale = WIDTH / (end - begin)
    height = TOP + threads * ROW + 24 + 18 * ((len(ops) + 7) // 8)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 10}" height="{height}" '
           'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
           f'<text x="{LEFT}" y="20">{title}: {end - begin:.0f} us</text>']
    for t in range(threads):
        out.append(f'<text x="4" y="{TOP + t * ROW + 20}">thread {t}</text>')
    for b in bars:
        x, width = LEFT + (b["ts"] - begin) * scale, max(0.3, b["dur"] * scale)
        y, colour = TOP + b["tid"] * ROW, COLOURS.get(b["name"], "#999999")
        out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 6}" fill="{colour}" stroke="white" '
                   f'stroke-width="0.3"><title>{b["args"]["node"]} {b["dur"]:.1f} us</title></rect>')
        name = b["args"]["node"].rsplit(".", 1)[-1]
        if width > 7 * len(name):
            out.append(f'<text x="{x + 3:.1f}" y="{y + 18}" fill="white">{name}</text>')
    for i, op in enumerate(ops):
        x, y = LEFT + i % 8 * 135, TOP + threads * ROW + 16 + i // 8 * 18
        out.append(f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{COLOURS.get(op, "#999999")}"/>'
                   f'<text x="{x + 14}" y="{y}">{op}</text>')
    return "\n".join(out + ["</svg>\n"])


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    events = json.load(open(sys.argv[1]))
    bars = sorted((e for e in events if e["ph"] == "X" and e["pid"] == 1), key=lambda e: e["ts"])
    bars = last_step(bars)
    scope = sys.argv[3] if len(sys.argv) == 4 else ""
    bars = [b for b in bars if b["args"]["node"].startswith(scope)]
    if not bars:
        sys.exit(f"{sys.argv[1]}: no node begins with {scope}")
    open(sys.argv[2], "w").write(picture(bars, scope or "one step"))


main()
