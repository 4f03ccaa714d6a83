"""Draw the pictures of docs/images: what validation shows of a right dump, and of the story's.

    python tools/evidence_pictures.py [--home FOLDER] [--into docs/images]

SmolLM2-135M answers six prompts of random ids under transformers (a minute on one core). The right dump holds
layers.2, layers.15 and layers.27; the other one holds embed, layers.2 and layers.15 under these names.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from PIL import Image

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.dump.reader import DumpReader
from eagle3.evidence.plots import evidence_png
from eagle3.evidence.validate import validate_dump
from infra.settings import Settings
from infra.smollm2 import ensure_smollm2
from tests.dumps import capture, reference_of
from tests.planting import Scene, embed_called_layer

SPEC = CaptureSpec(aux=(CapturePoint("layers.2"), CapturePoint("layers.15"), CapturePoint("layers.27")))
PICTURES: dict[str, Callable[[Scene], None]] = {
    "evidence-clean.png": lambda scene: scene.write(),
    "evidence-story.png": embed_called_layer,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=None, help="where models are kept (default: EAGLE3_HOME)")
    parser.add_argument("--into", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    target = ensure_smollm2(args.home or Settings().home)
    captured = capture(target, num_samples=6, max_new_tokens=16)
    args.into.mkdir(parents=True, exist_ok=True)
    for name, plant in PICTURES.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "dump"
            plant(Scene(captured, SPEC, folder))
            report = validate_dump(DumpReader.open(folder), captured.parts, reference=reference_of(target))
        # A palette makes a third of the bytes; chosen by coverage, so that a small legend keeps its colours.
        picture = Image.open(BytesIO(evidence_png(report))).convert("RGB")
        picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            args.into / name, optimize=True
        )
        print(f"{args.into / name}: {report.verdict}, {(args.into / name).stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
