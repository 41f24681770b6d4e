"""The style sheet of every page; light and dark follow the reader's system."""

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --good: #1a7f37; --bad: #b3261e;
  --idle: #6b7280; --add: #2da44e2e; --del: #cf222e26; --accent: #0b66c3; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --bad: #f47067; --idle: #9aa4b2;
  --accent: #6cb6ff; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 80px; }
h1 { font-size: 22px; overflow-wrap: anywhere; } h2 { font-size: 17px; margin-top: 32px; }
h3 { font-size: 14px; margin: 0 0 6px; } small { color: var(--idle); font-weight: normal; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
.jump a, .back a { margin-right: 14px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 12px 0; }
dt { color: var(--idle); } dd { margin: 0; overflow-wrap: anywhere; }
.badge { font-size: 12px; font-weight: 600; padding: 1px 8px; border-radius: 10px; color: #fff;
  white-space: nowrap; vertical-align: middle; }
.good { background: #1a7f37; } .bad { background: #b3261e; } .idle { background: #5b6470; }
.warn { background: #9a6700; }
pre { font: 12.5px/1.45 ui-monospace, Menlo, Consolas, monospace; margin: 0; padding: 10px 12px;
  overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; }
details { border: 1px solid var(--line); border-radius: 6px; margin: 6px 0; }
summary { cursor: pointer; padding: 4px 12px; font-size: 13px; }
details[open] > summary { border-bottom: 1px solid var(--line); }
details > pre { max-height: 560px; overflow-y: auto; }
.turn { border-left: 3px solid var(--accent); padding: 2px 0 2px 14px; margin: 18px 0; }
.action { background: var(--soft); border-radius: 6px; }
.diff { border: 1px solid var(--line); border-radius: 6px; }
.added { background: var(--add); } .removed { background: var(--del); }
.file { font-weight: 700; } .hunk { color: var(--accent); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 28px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
td.long { white-space: normal; min-width: 240px; overflow-wrap: anywhere; }
th.num, td.num { text-align: right; }
th { font-size: 13px; color: var(--idle); font-weight: 600; }
"""
