"""Writes a small image-text data set in the usual form, for examples/jsonl.toml: images and JSON lines.

    python examples/make_jsonl.py          # examples/data/train.jsonl, held-out.jsonl, images/*.png

Questions about one or two handwritten digits (scikit-learn's), and some about none, each with its answer.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT = 300
"""Images at the end of scikit-learn's list, which nobody trains on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--records", type=int, default=2000, help="to train on; a tenth as many are held out")
    arguments = parser.parse_args()
    digits = load_digits()
    (arguments.folder / "images").mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(digits.images):
        image = Image.fromarray((pixels * (255 / 16)).astype("uint8"), mode="L").resize(
            (32, 32), Image.Resampling.BICUBIC
        )
        image.save(arguments.folder / "images" / f"{number}.png")
    count = len(digits.images)
    for name, images, records in (
        ("train", range(count - HELD_OUT), arguments.records),
        ("held-out", range(count - HELD_OUT, count), arguments.records // 10),
    ):
        rng = random.Random(name)
        lines = [json.dumps(record(rng, images, digits.target)) for _ in range(records)]
        (arguments.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{arguments.folder / name}.jsonl: {records} records")


def record(rng: random.Random, images: range, target: list[int]) -> dict[str, object]:
    shown = rng.sample(images, rng.choice((0, 1, 1, 2)))
    if not shown:
        low, high = sorted(rng.sample(range(10), 2))
        question, answer = f"Which is larger, {NAMES[low]} or {NAMES[high]}?", NAMES[high]
    else:
        question = "<image>" * len(shown) + (" Which digit?" if len(shown) == 1 else " Which digits?")
        answer = " and ".join(NAMES[target[number]] for number in shown)
    return {
        "images": [f"images/{number}.png" for number in shown],
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
    }


if __name__ == "__main__":
    main()
