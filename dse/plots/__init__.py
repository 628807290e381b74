"""Figures: only this package draws. Charts take a table and return a sheet; `save` draws one and writes it.

`labels` says how a name looks and how a column becomes an axis, `canvas` lays a sheet out; charts are in `tables`,
`fronts`, `timelines`, `paths`, `sizes`, `searches`, `predictions` and `comparisons`; `references` adds others' values.
Studies yield (name, function that draws): a figure that nobody asked for costs nothing, and any can be drawn in another
process. No module imports matplotlib before it draws.
"""

from dse.plots.canvas import FORMATS as FORMATS
from dse.plots.canvas import WIDTHS as WIDTHS
from dse.plots.canvas import Draw as Draw
from dse.plots.canvas import FigureSheet as FigureSheet
from dse.plots.canvas import Frame as Frame
from dse.plots.canvas import draw as draw
from dse.plots.canvas import save as save
from dse.plots.canvas import title as title
from dse.plots.canvas import warm as warm
from dse.plots.labels import Axis as Axis
