"""A Chrome trace that mirrorsd wrote, read back, and put on a page that can be zoomed. Drawing is the timeline's."""

import json
from html import escape
from pathlib import Path
from typing import Any

from mirrorsd.cli.output.timeline import Box, Timeline, draw
from mirrorsd.graphs.errors import ConfigError

_LANES = {"steps": "text"}
_PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:1.5rem;font:15px system-ui,"Segoe UI",Helvetica,Arial,sans-serif;color:#1c2733;background:#fff}
#view{overflow-x:auto;border:1px solid #8884;border-radius:6px}button{font:inherit;min-width:2.2rem}
@media(prefers-color-scheme:dark){body{color:#e8edf2;background:#12171d}button{color:inherit;background:#222b35}}
"""
_ZOOM = """
const view=document.getElementById('view'),svg=view.querySelector('svg'),left=104,right=12,letter=6.6;
const height=+svg.getAttribute('height'),first=+svg.getAttribute('width'),length=+svg.dataset.ms;
let width=first;
function lay(wanted){
  width=Math.max(view.clientWidth,Math.min(wanted,first*40));
  const scale=(width-left-right)/length;
  svg.setAttribute('width',width);svg.setAttribute('viewBox',`0 0 ${width} ${height}`);
  svg.querySelector('rect.paper').setAttribute('width',width);
  for(const group of svg.querySelectorAll('g[data-start]')){
    const x=left+group.dataset.start*scale,wide=Math.max(.8,group.dataset.ms*scale-.6);
    for(const shape of group.children){
      if(shape.tagName=='rect'){shape.setAttribute('x',x);shape.setAttribute('width',wide)}
      if(shape.tagName=='line'){shape.setAttribute('x1',x);shape.setAttribute('x2',x)}
      if(shape.tagName=='text'){
        shape.setAttribute('x',x+4);
        const full=shape.dataset.full;
        if(full!==undefined){const fits=Math.floor((wide-8)/letter);
          const least=shape.classList.contains('words')?Math.min(2,full.length):full.length;
          shape.textContent=fits>=least?full.slice(0,fits):''}}}}
}
function zoom(factor,at){
  const share=(view.scrollLeft+at-left)/(width-left-right);
  lay(width*factor);view.scrollLeft=share*(width-left-right)+left-at;hold()}
function hold(){svg.querySelector('.names').setAttribute('transform',`translate(${view.scrollLeft},0)`);
  svg.querySelector('.legend').setAttribute('transform',`translate(${view.scrollLeft},0)`)}
view.addEventListener('scroll',hold);
view.addEventListener('wheel',event=>{if(event.ctrlKey||event.metaKey){event.preventDefault();
  zoom(event.deltaY<0?1.25:.8,event.clientX-view.getBoundingClientRect().left)}},{passive:false});
document.getElementById('in').onclick=()=>zoom(1.6,view.clientWidth/2);
document.getElementById('out').onclick=()=>zoom(1/1.6,view.clientWidth/2);
const from=+svg.dataset.from;lay(first);view.scrollLeft=from*(width-left-right)/length;hold();
"""


def read_trace(path: Path) -> Timeline:
    """Read a trace that `generate --trace` wrote.

    Raises:
        ConfigError: no such file, not JSON, or not such a trace.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        events = document["traceEvents"]
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        title = next(e["args"]["name"] for e in events if e["name"] == "process_name")
        boxes = tuple(_box(event, rows[event["tid"]]) for event in events if event["ph"] == "X")
        speed = document.get("otherData", {}).get("plain_tokens_per_second")
        plain_ms = 1e3 / float(speed) if speed else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ConfigError(f"{path} is not a trace; make one with `mirrorsd generate ... --trace FILE`.") from error
    if not boxes:
        raise ConfigError(f"{path} holds no work at all; nothing can be drawn.")
    return Timeline(title, boxes, 0.0, max(box.end for box in boxes), plain_ms).with_plain()


def _box(event: dict[str, Any], row: str) -> Box:
    start = event["ts"] / 1e3
    return Box(_LANES.get(row, row), event["name"], start, start + event["dur"] / 1e3, event.get("args", {}))


def page(whole: Timeline, start_ms: float, length_ms: float) -> str:
    """A page with the whole text, `length_ms` of it on the screen at first, and buttons to zoom."""
    width = round(1200 * max(whole.length_ms / length_ms, 1.0))
    ends = f'data-ms="{whole.length_ms:.3f}" data-from="{start_ms:.3f}"'
    drawn = draw(whole, min(width, 40_000)).replace("<svg ", f"<svg {ends} ", 1)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(whole.title)}</title><style>{_PAGE_STYLE}</style><body><h2>{escape(whole.title)}</h2>"
        f"<p>{escape('; '.join(whole.figures()))}.</p>"
        '<p><button id="out" title="show more of the time">\u2212</button> '
        '<button id="in" title="show more detail">+</button> or Ctrl and the wheel; scroll to move; a box tells more '
        f'under the mouse.</p><div id="view">{drawn}</div><script>{_ZOOM}</script></body></html>\n'
    )
