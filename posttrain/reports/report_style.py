"""The look of `report.html`: light and dark, on a screen and on paper."""

CSS = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --raised: #f5f6f8; --ink: #1d2229; --quiet: #626b78; --line: #dfe3e8; --accent: #0b62a8;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ground: #161a20; --raised: #1f252d; --ink: #dfe3e8; --quiet: #97a1ae; --line: #343c47; --accent: #69b7f0;
  }
  img { filter: invert(0.91) hue-rotate(180deg); }  /* white becomes nearly the ground, colours keep their hue */
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 68rem; background: var(--ground); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1 { margin: 0; font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 2.6rem 0 0.8rem; font-size: 1.15rem; }
header p { margin: 0.3rem 0 1rem; color: var(--quiet); }
nav { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; padding: 0.6rem 0; border-block: 1px solid var(--line); }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: 0.8rem; margin: 1.6rem 0 0; }
.cards div { padding: 0.8rem 1rem; background: var(--raised); border: 1px solid var(--line); border-radius: 8px; }
.cards dt { color: var(--quiet); font-size: 0.82rem; }
.cards dd { margin: 0.1rem 0 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; }
th, td { padding: 0.42rem 0.8rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--quiet); font-weight: 500; }
thead th { border-bottom-width: 2px; white-space: nowrap; }
td { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.facts th { width: 15rem; white-space: nowrap; }
tbody tr:hover td, tbody tr:hover th { background: var(--raised); }
pre {
  margin: 0; padding: 1rem 1.2rem; background: var(--raised); border: 1px solid var(--line); border-radius: 8px;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
}
img { display: block; width: 100%; height: auto; }
section > p { max-width: 46rem; white-space: pre-wrap; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  section { break-inside: auto; }
  h2 { break-after: avoid; }
  tr, img, .cards div { break-inside: avoid; }
}
"""
