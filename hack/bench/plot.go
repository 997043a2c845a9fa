package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"image/color"
	"math"
	"os"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

var (
	durableColor = color.RGBA{R: 0x1f, G: 0x77, B: 0xb4, A: 0xff}
	riskyColor   = color.RGBA{R: 0xd6, G: 0x8a, B: 0x3a, A: 0xff}
	lineColors   = []color.Color{durableColor, color.RGBA{R: 0x2c, G: 0xa0, B: 0x2c, A: 0xff}, color.RGBA{R: 0x94, G: 0x67, B: 0xbd, A: 0xff}}
)

// plotRecords draws what there is of claims and growth, side by side.
func plotRecords(file string, records []record) error {
	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
	plotter.DefaultFont = plot.DefaultFont
	var plots []*plot.Plot
	for _, draw := range []func([]record) (*plot.Plot, error){plotClaims, plotGrowth} {
		p, err := draw(records)
		if err != nil {
			return fmt.Errorf("drawing: %w", err)
		}
		if p != nil {
			plots = append(plots, p)
		}
	}
	if len(plots) == 0 {
		return errors.New("--plot: neither claims nor growth was measured")
	}
	canvas := vgsvg.New(vg.Length(len(plots))*16*vg.Centimeter, 10*vg.Centimeter)
	tiles := draw.Tiles{Rows: 1, Cols: len(plots), PadX: vg.Centimeter, PadTop: vg.Millimeter * 3, PadBottom: vg.Millimeter * 3, PadLeft: vg.Millimeter * 3, PadRight: vg.Millimeter * 3}
	canvases := plot.Align([][]*plot.Plot{plots}, tiles, draw.New(canvas))
	for i, p := range plots {
		p.Draw(canvases[0][i])
	}
	var svg bytes.Buffer
	if _, err := canvas.WriteTo(&svg); err != nil {
		return fmt.Errorf("drawing: %w", err)
	}
	// Where that font is not installed, others of the same widths are.
	text := strings.ReplaceAll(svg.String(), "font-family:Liberation Sans", "font-family:Liberation Sans,Arial,Helvetica,sans-serif")
	return os.WriteFile(file, []byte(text), 0o644)
}

// plotClaims has a bar per system, at the largest number of clients. Bars have no beginning on a logarithmic axis, so the
// logarithms are drawn on a linear one.
func plotClaims(records []record) (*plot.Plot, error) {
	var bars []record
	clients := 0
	for _, r := range records {
		if r.Scenario == "claims" {
			clients = max(clients, r.Clients)
		}
	}
	for _, r := range records {
		if r.Scenario == "claims" && r.Clients == clients {
			bars = append(bars, r)
		}
	}
	if len(bars) == 0 {
		return nil, nil
	}
	slices.SortFunc(bars, func(a, b record) int { return cmp.Compare(a.Value, b.Value) }) // upwards
	p := plot.New()
	p.Title.Text = fmt.Sprintf("Claims/s, %d clients", clients)
	var names []string
	labels := plotter.XYLabels{}
	values := map[bool]plotter.Values{}
	for i, r := range bars {
		names = append(names, r.System)
		length := math.Log10(max(r.Value, 1))
		values[r.Durable] = append(values[r.Durable], length)
		values[!r.Durable] = append(values[!r.Durable], 0)
		labels.XYs = append(labels.XYs, plotter.XY{X: length, Y: float64(i)})
		labels.Labels = append(labels.Labels, fmt.Sprintf("%.0f", r.Value))
	}
	for _, kind := range []struct {
		durable bool
		label   string
		color   color.Color
	}{{true, "answered claims survive a crash", durableColor}, {false, "they do not", riskyColor}} {
		chart, err := plotter.NewBarChart(values[kind.durable], vg.Points(18))
		if err != nil {
			return nil, err
		}
		chart.Horizontal, chart.Color, chart.LineStyle.Width = true, kind.color, 0
		p.Add(chart)
		p.Legend.Add(kind.label, chart)
	}
	figures, err := plotter.NewLabels(labels)
	if err != nil {
		return nil, err
	}
	for i := range figures.TextStyle {
		figures.TextStyle[i].YAlign = draw.YCenter
	}
	figures.Offset.X = vg.Points(4)
	p.Add(figures)
	p.NominalY(names...)
	p.X.Min, p.X.Max = 0, math.Ceil(math.Log10(bars[len(bars)-1].Value))+0.7
	p.X.Tick.Marker = powersOfTen(int(p.X.Max))
	p.Legend.XOffs, p.Legend.YOffs = vg.Points(-6), vg.Points(6)
	p.Legend.Padding = vg.Points(4)
	return p, nil
}

func powersOfTen(last int) plot.ConstantTicks {
	var ticks plot.ConstantTicks
	for e := range last + 1 {
		ticks = append(ticks, plot.Tick{Value: float64(e), Label: fmt.Sprintf("%.0f", math.Pow(10, float64(e)))})
	}
	return ticks
}

// plotGrowth has a line per share sold, over the number of units.
func plotGrowth(records []record) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = "Claims/s by units of the sale, 512 clients"
	p.X.Label.Text = "units (few left: the batches are small)"
	drawn := 0
	for _, sold := range soldPercents {
		var points plotter.XYs
		for _, r := range records {
			if r.Scenario == "growth" && r.SoldPercent != nil && *r.SoldPercent == sold && !*r.Returns {
				points = append(points, plotter.XY{X: math.Log10(float64(r.Units)), Y: r.Value})
			}
		}
		if len(points) == 0 {
			continue
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		line.Color, line.Width = lineColors[drawn], vg.Points(2)
		dots.Color, dots.Shape = lineColors[drawn], draw.CircleGlyph{}
		p.Add(line, dots)
		p.Legend.Add(fmt.Sprintf("%d %% sold", sold), line, dots)
		drawn++
	}
	if drawn == 0 {
		return nil, nil
	}
	p.Add(plotter.NewGrid())
	p.X.Tick.Marker = powersOfTen(6)
	p.Y.Min = 0
	p.Y.Max *= 1.35 // room for the legend
	p.Y.Tick.Marker = plot.TickerFunc(wholeTicks)
	p.Legend.Top, p.Legend.Left = true, true
	p.Legend.XOffs, p.Legend.YOffs, p.Legend.Padding = vg.Points(6), vg.Points(-6), vg.Points(4)
	return p, nil
}

// wholeTicks are the default ones, without decimals.
func wholeTicks(low, high float64) []plot.Tick {
	ticks := plot.DefaultTicks{}.Ticks(low, high)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = fmt.Sprintf("%.0f", ticks[i].Value)
		}
	}
	return ticks
}
