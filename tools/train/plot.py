"""plot.py OUT.svg CURVES.csv...: bits per byte and needle scores over the hours of training, as a picture."""
import csv
import sys

WIDTH, HEIGHT, LEFT, TOP = 860, 230, 60, 30
COLOURS = ["#1b6ca8", "#c8553d", "#2a9d5c"]


def panel(y0, title, series, hours, low, high, marks):
    def at(x, y):
        return (LEFT + x / hours * (WIDTH - LEFT - 20), y0 + HEIGHT - (min(max(y, low), high) - low) / (high - low) * HEIGHT)

    out = [f'<rect x="{LEFT}" y="{y0}" width="{WIDTH - LEFT - 20}" height="{HEIGHT}" fill="none" stroke="#999"/>',
           f'<text x="{LEFT}" y="{y0 - 8}">{title}</text>']
    for k in range(5):
        value = low + (high - low) * k / 4
        out.append(f'<text x="{LEFT - 8}" y="{at(0, value)[1] + 4}" text-anchor="end">{value:.4g}</text>')
    for x, text in marks:
        out.append(f'<line x1="{at(x, 0)[0]:.1f}" x2="{at(x, 0)[0]:.1f}" y1="{y0}" y2="{y0 + HEIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{at(x, 0)[0] + 3:.1f}" y="{y0 + HEIGHT - 6}" fill="#777">{text}</text>')
    for (name, points), colour in zip(series, COLOURS):
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(x, y) for x, y in points))
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x, y = at(*points[-1])
        out.append(f'<text x="{x:.1f}" y="{y - 6:.1f}" fill="{colour}" text-anchor="end">{name}</text>')
    return out


def main():
    rows = [r for path in sys.argv[2:] for r in csv.DictReader(open(path)) if r["bits_per_byte"] != "nan"]
    hours = max(float(r["hours"]) for r in rows)
    curve = {k: [(float(r["hours"]), float(r[k])) for r in rows] for k in ("bits_per_byte", "needle8", "needle1")}
    marks, length = [], None
    for r in rows:
        if r["length"] != length:
            length = r["length"]
            marks.append((float(r["hours"]), length))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{2 * HEIGHT + 110}" font-family="sans-serif" '
           'font-size="11"><rect width="100%" height="100%" fill="white"/>']
    out += panel(TOP, "bits per byte, held-out documentation (grey: training length)",
                 [("bits per byte", curve["bits_per_byte"])], hours, 1.6, 2.8, marks)
    out += panel(TOP + HEIGHT + 50, f"needles found at the training length, of 1 over {hours:.2f} hours",
                 [("eight facts of one template", curve["needle8"]), ("one fact", curve["needle1"])], hours, 0, 1, [])
    open(sys.argv[1], "w").write("\n".join(out) + "\n</svg>\n")


if __name__ == "__main__":
    main()
