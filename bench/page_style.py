"""Style and script of the report's page."""

from __future__ import annotations

STYLE = """
:root{--back:#fafaf8;--card:#fff;--ink:#1d1d22;--muted:#6d6d78;--edge:#e4e3de;--bad:#b3261e;
--c0:#2f62d9;--c1:#d9772b;--c2:#1f8f6b;--c3:#b8358b;--c4:#7a56d0;--c5:#8d6b1f;--c6:#2a95ad;--c7:#85858f;
--ramp:#f3d9a4;--steady:#bfe3cb;--refill:#dcd6ee;--drain:#f1c9c4}
@media(prefers-color-scheme:dark){:root{--back:#131418;--card:#1c1e24;--ink:#e8e8ec;--muted:#9a9ba6;--edge:#32343c;
--bad:#ff8a80;--c0:#7ea6ff;--c1:#ffa964;--c2:#5fd3a8;--c3:#f27fc8;--c4:#b39bff;--c5:#d9b85c;--c6:#63cfe6;--c7:#9a9ba6;
--ramp:#54431d;--steady:#1e4a33;--refill:#3a3356;--drain:#552b2a}}
*{box-sizing:border-box}
body{margin:0 auto;padding:28px 24px 60px;max-width:1360px;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:25px;margin:0}h2{font-size:18px;margin:34px 0 12px}h3{font-size:15px;margin:0;font-weight:600}
p{margin:4px 0}small,.muted{color:var(--muted)}.bad{color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(250px,1fr));gap:14px;margin:22px 0}
.card,figure,pre{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:14px 16px}
.big{font-size:27px;font-weight:600;font-variant-numeric:tabular-nums}.big small{font-size:14px;font-weight:400}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,540px),1fr));gap:16px}
figure{margin:0}figcaption{font-weight:600;margin-bottom:6px}svg{display:block;width:100%;height:auto}
pre{overflow-x:auto;font:12.5px/1.5 ui-monospace,Menlo,Consolas,monospace}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;color:var(--muted);margin-top:6px}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;background:var(--c)}
.key.phase{background:var(--p)}
.grid{stroke:var(--edge);fill:none}.axis{stroke:var(--muted);fill:none}
.tick{font-size:11px;fill:var(--muted)}.label{font-size:12px;fill:var(--muted)}
.line{fill:none;stroke:var(--c);stroke-width:1.9;stroke-linejoin:round}.dashed{stroke-dasharray:5 4}
.level{fill:none;stroke:var(--ink);stroke-width:1.6;stroke-dasharray:2 3}
.dot{fill:var(--c);stroke:var(--card);stroke-width:1.2}.dot.hollow{fill:var(--card);stroke:var(--c);stroke-width:2}
.band{fill:var(--c);opacity:.16}rect.phase{fill:var(--p);opacity:.55}
.ramp{--p:var(--ramp)}.steady{--p:var(--steady)}.refill{--p:var(--refill)}.drain{--p:var(--drain)}
.s0{--c:var(--c0)}.s1{--c:var(--c1)}.s2{--c:var(--c2)}.s3{--c:var(--c3)}
.s4{--c:var(--c4)}.s5{--c:var(--c5)}.s6{--c:var(--c6)}.s7{--c:var(--c7)}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--back);padding:5px 9px;border-radius:6px;
font-size:12.5px;white-space:pre;z-index:9}
"""

# what a pointer over a plot reads: of each line, the point nearest to it from left to right
SCRIPT = """
const tip=document.getElementById('tip');
for(const svg of document.querySelectorAll('svg')){
  const lines=[...svg.querySelectorAll('path[data-at]')].map(p=>({name:p.dataset.name,at:JSON.parse(p.dataset.at)}));
  svg.addEventListener('mousemove',e=>{
    const x=(e.clientX-svg.getBoundingClientRect().left)*svg.viewBox.baseVal.width/svg.getBoundingClientRect().width;
    const found=lines.map(l=>[l.name,l.at.reduce((a,b)=>Math.abs(b[0]-x)<Math.abs(a[0]-x)?b:a)]);
    if(!found.length)return;
    tip.textContent=found.map(([name,p])=>name+': '+p[3]+' at '+p[2]).join('\\n');
    tip.hidden=false;
    tip.style.left=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8)+'px';tip.style.top=(e.clientY+14)+'px';
  });
  svg.addEventListener('mouseleave',()=>{tip.hidden=true});
}
"""
