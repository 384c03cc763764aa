"""Create the toy of images.yaml: a small model that reads images, with random weights, and pictures of one color
each.
"""

import json
import random
from pathlib import Path

from PIL import Image

from rftdask.models.toy import build_toy_image_model

FOLDER = Path("toy_images")
COLORS = {"r": (220, 30, 30), "g": (30, 200, 60), "b": (40, 60, 230), "w": (240, 240, 240)}
QUESTION = "color?"


def paint(color: str, draw: random.Random) -> Image.Image:
    """Return a picture of 28 x 28 pixels, with small random changes of the color."""
    return Image.new("RGB", (28, 28), tuple(max(0, min(255, c + draw.randint(-20, 20))) for c in COLORS[color]))


def main() -> None:
    build_toy_image_model(FOLDER / "model")
    draw = random.Random(0)
    for name, count in (("train", 64), ("eval", 32)):
        rows = []
        for number in range(count):
            color = draw.choice(list(COLORS))
            file = FOLDER / f"{name}-{number}.png"
            paint(color, draw).save(file)
            rows.append({"question": QUESTION, "answer": color, "image": file.name})
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [{"prompt": QUESTION, "response": draw.choice(list(COLORS))} for _ in range(256)]
    (FOLDER / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))


if __name__ == "__main__":
    main()
