"""The look of the pages: the palette in light and dark; `style.css` has the rules."""

from pathlib import Path

CSS = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
PALETTE = """
:root {
  --ground: #ffffff; --raised: #f5f6f8; --ink: #1d2229; --quiet: #5c6571; --line: #dfe3e8; --accent: #0b62a8;
  --c0: #0072b2; --c1: #c04f00; --c2: #007f5f; --c3: #a8528a; --c4: #8a6d00; --c5: #2b7fa8;
  --c6: #6b4fa0; --c7: #50565e;
  --good: #1a7f4b; --bad: #b3261e; --warn: #8a5a00; --for: #2a7de1; --against: #e0701b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #161a20; --raised: #1f252d; --ink: #dfe3e8; --quiet: #97a1ae; --line: #343c47; --accent: #69b7f0;
    --c0: #56b4e9; --c1: #f0914a; --c2: #3fc79a; --c3: #dd9bc4; --c4: #e0be4a; --c5: #8fd0f0;
    --c6: #b7a0e8; --c7: #b3bbc6;
    --good: #5fcf95; --bad: #ff8a80; --warn: #e5b567; --for: #5aa2ff; --against: #f0914a;
  }
}
"""
