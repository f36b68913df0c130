"""The look of the pages: the palette in light and dark, then the rules."""

PALETTE = """
:root {
  --ground: #ffffff; --raised: #f5f6f8; --ink: #1d2229; --quiet: #5c6571; --line: #dfe3e8; --accent: #0b62a8;
  --c0: #0072b2; --c1: #c04f00; --c2: #007f5f; --c3: #a8528a; --c4: #8a6d00; --c5: #2b7fa8; --c6: #6b4fa0; --c7: #50565e;
  --good: #1a7f4b; --bad: #b3261e; --warn: #8a5a00; --for: #2a7de1; --against: #e0701b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #161a20; --raised: #1f252d; --ink: #dfe3e8; --quiet: #97a1ae; --line: #343c47; --accent: #69b7f0;
    --c0: #56b4e9; --c1: #f0914a; --c2: #3fc79a; --c3: #dd9bc4; --c4: #e0be4a; --c5: #8fd0f0; --c6: #b7a0e8; --c7: #b3bbc6;
    --good: #5fcf95; --bad: #ff8a80; --warn: #e5b567; --for: #5aa2ff; --against: #f0914a;
  }
}
"""

CSS = """
.gradio-container { max-width: none !important; background: var(--ground) !important; }
.gradio-container .main.fillable { max-width: 100rem !important; padding: 0.5rem 1.5rem 4rem !important; }
.gradio-container .nav-holder { border-bottom: 1px solid var(--line); padding: 0 1.5rem; background: var(--ground); }
.gradio-container .nav-holder nav { max-width: 100rem; justify-content: flex-start; gap: 1.5rem; padding: 0; border: 0; }
.gradio-container .nav-holder nav a {
  padding: 0.9rem 0 0.75rem; border-radius: 0; color: var(--quiet); background: none !important;
  font-size: 0.95rem; border-bottom: 2px solid transparent;
}
.gradio-container .nav-holder nav a:hover { color: var(--ink); }
.gradio-container .nav-holder nav a.active { color: var(--ink); font-weight: 600; border-bottom-color: var(--accent); }

.view { color: var(--ink); font-size: 0.94rem; line-height: 1.5; overflow: visible !important; }
.view.waiting { cursor: progress; }
.view h1 { margin: 1rem 0 0.2rem; font-size: 1.5rem; line-height: 1.25; letter-spacing: -0.01em; font-weight: 650; overflow-wrap: anywhere; }
.view h2 { margin: 2rem 0 0.6rem; font-size: 1.1rem; font-weight: 600; }
.view h3 { margin: 1.4rem 0 0.4rem; font-size: 0.98rem; font-weight: 600; }
.view p { margin: 0.4rem 0; max-width: 60rem; }
.view a { color: var(--accent); text-decoration: none; }
.view a:hover { text-decoration: underline; }
.view :focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; border-radius: 3px; }
.view small, .view .quiet { color: var(--quiet); font-size: 0.86rem; }
.view .nowrap { white-space: nowrap; }
.view code, .view pre { font: 0.86rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.view pre {
  margin: 0.4rem 0; padding: 0.8rem 1rem; max-height: 26rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  background: var(--raised); border: 1px solid var(--line); border-radius: 8px;
}
.view .message { padding: 0.7rem 1rem; border: 1px solid var(--line); border-left: 3px solid var(--accent); border-radius: 6px; background: var(--raised); white-space: pre-wrap; overflow-wrap: anywhere; }
.view .message.warning { border-left-color: var(--warn); }
.view .message.error { border-left-color: var(--bad); }

.view .controls { display: flex; flex-wrap: wrap; gap: 0.7rem 1.1rem; align-items: flex-end; margin: 0.9rem 0; }
.view .field { display: flex; flex-direction: column; gap: 0.15rem; }
.view .wide-field { flex: 1 1 18rem; }
.view .label, .view legend { color: var(--quiet); font-size: 0.8rem; padding: 0; }
.view input[type=search], .view input[type=text], .view select {
  font: inherit; color: var(--ink); background: var(--ground); border: 1px solid var(--line); border-radius: 6px;
  padding: 0.3rem 0.55rem; min-height: 2.1rem; max-width: 100%;
}
.view input[type=search] { min-width: 14rem; width: 100%; }
.view fieldset { border: 0; margin: 0; padding: 0; }
.view .steps { display: inline-flex; border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
.view .steps label { position: relative; padding: 0.3rem 0.7rem; min-height: 2rem; cursor: pointer; }
.view .steps label + label { border-left: 1px solid var(--line); }
.view .steps input { position: absolute; opacity: 0; inset: 0; margin: 0; cursor: pointer; }
.view .steps label:has(:checked) { background: var(--accent); color: var(--ground); }
.view .steps label:has(:focus-visible) { outline: 2px solid var(--accent); outline-offset: -2px; }
.view button {
  font: inherit; color: var(--ink); background: var(--raised); border: 1px solid var(--line); border-radius: 6px;
  padding: 0.3rem 0.8rem; cursor: pointer;
}
.view button:hover { border-color: var(--quiet); }

.view .wide { overflow-x: auto; margin: 0.4rem 0 0.8rem; }
.view table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.view th, .view td { padding: 0.38rem 0.7rem; border: 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; background: none; }
.view th { color: var(--quiet); font-weight: 500; font-size: 0.84rem; white-space: nowrap; }
.view th a { color: inherit; }
.view td { overflow-wrap: anywhere; unicode-bidi: isolate; }
.view th.number, .view td.number { text-align: right; white-space: nowrap; }
.view tbody tr:hover { background: var(--raised); }
.view .runs td { white-space: nowrap; }
.view .runs td details p { white-space: normal; min-width: 16rem; }
.view .name { font-weight: 600; color: var(--ink); overflow-wrap: anywhere; }
.view .clip { display: inline-block; max-width: 16rem; overflow: hidden; text-overflow: ellipsis; vertical-align: bottom; }
.view .facts { display: grid; grid-template-columns: max-content 1fr; gap: 0.1rem 1.4rem; margin: 0.5rem 0; }
.view .facts dt { color: var(--quiet); }
.view .facts dd { margin: 0; overflow-wrap: anywhere; }
.view .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: 0.7rem; margin: 1rem 0; }
.view .cards div { padding: 0.6rem 0.9rem; background: var(--raised); border: 1px solid var(--line); border-radius: 8px; }
.view .cards dt { color: var(--quiet); font-size: 0.8rem; }
.view .cards dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }

.view .badge { display: inline-block; padding: 0 0.5rem; border-radius: 999px; font-size: 0.8rem; line-height: 1.5; border: 1px solid var(--line); color: var(--quiet); }
.view .badge.running { color: var(--accent); border-color: currentColor; }
.view .badge.running::before { content: "● "; }
.view .badge.finished, .view .badge.passed { color: var(--good); border-color: currentColor; }
.view .badge.failed, .view .badge.killed, .view .badge.damaged { color: var(--bad); border-color: currentColor; }
.view .badge.interrupted, .view .badge.alarm { color: var(--warn); border-color: currentColor; }
.view summary { cursor: pointer; list-style-position: inside; }
.view td summary { list-style: none; }
.view td summary .badge::after { content: " ?"; opacity: 0.7; }
.view .toggle { display: inline-grid; place-items: center; width: 1.4rem; height: 1.4rem; border: 1px solid var(--line); border-radius: 4px; color: var(--quiet); line-height: 1; }
.view .toggle.on { color: var(--ground); background: var(--key); border-color: var(--key); }
.view .toggle:hover { border-color: var(--accent); text-decoration: none; }

.view .c0 { --key: var(--c0); } .view .c1 { --key: var(--c1); } .view .c2 { --key: var(--c2); } .view .c3 { --key: var(--c3); }
.view .c4 { --key: var(--c4); } .view .c5 { --key: var(--c5); } .view .c6 { --key: var(--c6); } .view .c7 { --key: var(--c7); }
.view .key { display: inline-flex; align-items: baseline; gap: 0.35rem; margin-right: 0.9rem; color: var(--ink); font-size: 0.84rem; overflow-wrap: anywhere; }
.view .key::before { content: ""; flex: none; width: 0.85rem; height: 0; border-top: 2.5px solid var(--key); transform: translateY(-0.25rem); }
.view .key.dashed::before { border-top-style: dashed; }
.view .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1.2rem 1.6rem; margin: 0.8rem 0; }
.view figure.chart { margin: 0; min-width: 0; }
.view figcaption { display: flex; flex-wrap: wrap; gap: 0.1rem 1rem; justify-content: space-between; margin: 0 0 0.2rem; }
.view figcaption .title { font-size: 0.9rem; font-weight: 550; }
.view figcaption .key { margin: 0 0 0 0.8rem; color: var(--quiet); font-size: 0.78rem; }
.view figure svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
.view figure[data-at] svg { cursor: pointer; }
.view svg .line { fill: none; stroke: var(--key); stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.view svg .raw { opacity: 0.28; stroke-width: 1; }
.view svg .dashed { stroke-dasharray: 5 4; }
.view svg .grid { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
.view svg .cross { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 2 2; vector-effect: non-scaling-stroke; }
.view svg .tick { fill: var(--quiet); font-size: 10.5px; font-variant-numeric: tabular-nums; }
.view svg .tick.end { text-anchor: end; } .view svg .tick.middle { text-anchor: middle; }
.view .spark { width: 6rem; height: 1.4rem; vertical-align: middle; }
.view .spark .end { fill: var(--c0); }
.view .tip {
  position: fixed; z-index: 50; display: flex; flex-direction: column; max-width: 20rem; padding: 0.4rem 0.7rem; pointer-events: none;
  background: var(--ground); border: 1px solid var(--line); border-radius: 6px; box-shadow: 0 2px 10px rgb(0 0 0 / 0.15); font-size: 0.82rem;
}
.view .tip .key { margin: 0; }

.view .path { display: flex; flex-wrap: wrap; gap: 0.2rem 0.6rem; align-items: baseline; margin: 0.8rem 0; font-size: 0.95rem; }
.view .path > * + *::before { content: "›"; margin-right: 0.6rem; color: var(--quiet); }
.view .text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.view .tokens { padding: 0.8rem 1rem; border: 1px solid var(--line); border-radius: 8px; line-height: 1.9; white-space: pre-wrap; overflow-wrap: anywhere; font: 0.92rem/1.9 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.view .tokens a { color: var(--ink); padding: 0.1rem 0; border-radius: 2px; background: color-mix(in srgb, var(--tone, transparent) calc(var(--much, 0) * 1%), transparent); }
.view .tokens a:hover { outline: 1px solid var(--accent); text-decoration: none; }
.view .tokens a.clipped { text-decoration: line-through; }
.view .tokens a.most { box-shadow: inset 0 -2px 0 var(--ink); }
.view .tokens a.chosen { outline: 2px solid var(--accent); }
.view mark { background: color-mix(in srgb, var(--warn) 30%, transparent); color: inherit; border-radius: 2px; }
.view .sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 0.8rem; }
.view .side { border: 1px solid var(--line); border-radius: 8px; padding: 0.7rem 0.9rem; min-width: 0; }
.view .item { margin: 1rem 0; padding-top: 0.8rem; border-top: 1px solid var(--line); }

@media (max-width: 700px) {
  .gradio-container .main.fillable { padding: 0.3rem 0.8rem 3rem !important; }
  .gradio-container .nav-holder { padding: 0 0.8rem; overflow-x: auto; }
  .gradio-container .nav-holder nav { gap: 1.1rem; }
  .view { font-size: 0.9rem; }
  .view th, .view td { padding: 0.35rem 0.5rem; }
  .view .facts { grid-template-columns: 1fr; }
  .view .facts dt { margin-top: 0.4rem; }
}
"""
