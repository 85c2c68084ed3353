"""The style sheet of the page, for screens, phones and paper."""

STYLE = """
:root{color-scheme:light}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem 1rem 3rem;max-width:62rem;
font:16px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
color:#1c2330;background:#fff;overflow-wrap:break-word}
h1{font-size:1.7rem;margin:.2rem 0 .4rem}
h2{font-size:1.2rem;margin:2rem 0 .5rem;border-bottom:2px solid #dfe5ee;padding-bottom:.2rem}
p,ul{max-width:46rem}
code,pre{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.86em}
pre{background:#f3f6fa;border:1px solid #dfe5ee;border-radius:6px;padding:.7rem .8rem;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:30rem;overflow:auto}
.cards,.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,18rem),1fr));gap:1rem;margin:1rem 0}
.card{border:1px solid #cfd8e6;border-left:6px solid #1f5fa8;border-radius:6px;padding:.7rem 1rem}
.card b{display:block;font-size:1.45rem;line-height:1.3}
.card span{color:#46536a;font-size:.92rem}
.formula{text-align:center;font-size:1.08rem;background:#f3f6fa;border-radius:6px;padding:.7rem .5rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:.6rem 0;font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid #dfe5ee;padding:.35rem .7rem;text-align:right;vertical-align:top}
th:first-child,td:first-child{text-align:left;padding-left:0}
th{font-weight:600;color:#46536a;font-size:.9rem}
td.own{font-weight:600;color:#174a85}
figure{margin:0}
figcaption{font-size:.9rem;color:#46536a}
svg{width:100%;height:auto;display:block}
.key{list-style:none;padding:0;margin:.2rem 0 .4rem;font-size:.9rem}
.key svg{display:inline-block;width:2.4rem;height:.7rem;margin-right:.5rem}
.note{color:#46536a;font-size:.92rem}
@media (max-width:30rem){body{font-size:15px}th,td{padding:.3rem .3rem;font-size:.8rem}
th{font-size:.75rem}.card b{font-size:1.25rem}}
@media print{body{max-width:none;padding:0;font-size:10.5pt}pre{max-height:none}
figure,table,.card,.formula{break-inside:avoid}
h2{break-after:avoid}.figures{grid-template-columns:1fr 1fr}}
"""
