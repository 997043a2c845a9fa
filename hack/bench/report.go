package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"
)

// record is one figure.
type record struct {
	Scenario    string  `json:"scenario"`
	System      string  `json:"system"`
	Value       float64 `json:"value"`
	Unit        string  `json:"unit"`
	Durable     bool    `json:"durable"`
	Clients     int     `json:"clients"`
	Units       int64   `json:"units"`
	Case        string  `json:"case,omitempty"` // what is measured, where the scenario has several
	P50         float64 `json:"p50_ms,omitempty"`
	P99         float64 `json:"p99_ms,omitempty"`
	Max         float64 `json:"max_ms,omitempty"`
	CPU         float64 `json:"cpu_s_per_1000,omitempty"` // of clients and servers
	Processes   int     `json:"processes,omitempty"`
	SoldPercent *int    `json:"sold_percent,omitempty"`
	Returns     *bool   `json:"returns,omitempty"`
	Returned    int     `json:"returned,omitempty"` // units that came back while it was measured
	Claims      int     `json:"claims,omitempty"`   // that the value rests on
	Misses      int     `json:"misses,omitempty"`
	Ratio       float64 `json:"ratio,omitempty"`
}

// of fills in what clients saw.
func (r record) of(o outcome) record {
	r.Value, r.P50, r.P99 = round(o.rate()), round(o.percentile(0.50)), round(o.percentile(0.99))
	r.CPU = round(o.CPU.Seconds() / float64(o.Done) * 1000)
	r.Claims, r.Misses, r.Returned = o.Done, o.Misses, o.Returned
	r.Units = max(r.Units, o.Units)
	return r
}

// round keeps four digits: there is not more in a measurement.
func round(v float64) float64 {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	scale := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}

// report collects figures, and prints them as JSON or as tables.
type report struct {
	json    bool
	begin   time.Time
	records []record
}

func (r *report) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bench: %5s %s\n", time.Since(r.begin).Round(time.Second), fmt.Sprintf(format, args...))
}

func (r *report) add(rec record) {
	r.records = append(r.records, rec)
	if r.json {
		_ = json.NewEncoder(os.Stdout).Encode(rec)
	}
}

// header says on what was measured: on stdout above the tables, or on stderr beside JSON.
func (r *report) header(ctx context.Context, s *servers) error {
	var out io.Writer = os.Stdout
	if r.json {
		out = os.Stderr
	}
	var version, format, isolation string
	var flush, syncBinlog int
	var doublewrite, binlog string
	var bufferPool int64
	err := s.admin.QueryRowContext(ctx, `SELECT VERSION(), @@innodb_flush_log_at_trx_commit, @@sync_binlog, @@innodb_doublewrite, @@log_bin,
		@@binlog_format, @@innodb_buffer_pool_size`).Scan(&version, &flush, &syncBinlog, &doublewrite, &binlog, &format, &bufferPool)
	if err != nil {
		return fmt.Errorf("asking for the server's settings: %w", err)
	}
	db, err := openSQL(s.config.FormatDSN(), 1)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	if err := db.QueryRowContext(ctx, "SELECT @@transaction_isolation").Scan(&isolation); err != nil {
		return fmt.Errorf("asking for the session's isolation: %w", err)
	}
	text := fmt.Sprintf("machine  %s, %d cores, Linux %s, %s memory\n", field("/proc/cpuinfo", "model name"), runtime.NumCPU(),
		strings.TrimSpace(readFile("/proc/sys/kernel/osrelease")), field("/proc/meminfo", "MemTotal"))
	text += fmt.Sprintf("MySQL    %s, innodb_flush_log_at_trx_commit=%d, sync_binlog=%d, innodb_doublewrite=%s, log_bin=%s, binlog_format=%s, sessions %s, buffer pool %d MiB\n",
		version, flush, syncBinlog, doublewrite, binlog, format, isolation, bufferPool>>20)
	if s.redis != nil {
		text += fmt.Sprintf("Redis    %s, aof_enabled=%s, save=%q\n", s.redisInfo(ctx, "redis_version"), s.redisInfo(ctx, "aof_enabled"), s.redis.ConfigGet(ctx, "save").Val()["save"])
	}
	_, err = io.WriteString(out, text)
	return err
}

func readFile(path string) string {
	b, _ := os.ReadFile(path)
	return string(b)
}

// field reads "name : value" from a file of /proc.
func field(path, name string) string {
	if m := regexp.MustCompile(`(?m)^` + name + `\s*:\s*(.*)$`).FindStringSubmatch(readFile(path)); m != nil {
		return m[1]
	}
	return "?"
}

// table prints the figures of a scenario.
func (r *report) table(scenario string) {
	if r.json {
		return
	}
	var own []record
	for _, rec := range r.records {
		if rec.Scenario == scenario {
			own = append(own, rec)
		}
	}
	fmt.Printf("\n%s\n\n", scenario)
	var rows []string
	switch scenario {
	case "claims":
		rows = claimsTable(own)
	case "designs":
		fmt.Println(strings.Join(designsTable(own), "\n"))
		return
	default:
		rows = plainTable(own)
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(w, strings.Join(rows, "\n"))
	_ = w.Flush() // stdout: there is nobody to tell
}

func claimsTable(records []record) []string {
	rows := []string{"clients\tsystem\tclaims/s\tof flashsale\tdurable\tp50 ms\tp99 ms\tCPU s per 1,000\tmisses\t"}
	product := map[int]float64{}
	for _, r := range records {
		if r.System == "flashsale" {
			product[r.Clients] = r.Value
		}
	}
	for i, r := range records {
		if i > 0 && records[i-1].Clients != r.Clients {
			rows = append(rows, "\t\t\t\t\t\t\t\t\t")
		}
		durable := map[bool]string{true: "yes", false: "NO"}[r.Durable]
		if r.System == "redis-ledger" {
			durable = "ledger only"
		}
		rows = append(rows, fmt.Sprintf("%d\t%s\t%.0f\t%.2f\t%s\t%.4g\t%.4g\t%.4g\t%d\t",
			r.Clients, r.System, r.Value, r.Value/product[r.Clients], durable, r.P50, r.P99, r.CPU, r.Misses))
	}
	return rows
}

func plainTable(records []record) []string {
	rows := []string{"what	system	units	sold %	returns	clients	processes	value	unit	ratio	p50 ms	p99 ms	max ms	CPU s per 1,000	over	"}
	for _, r := range records {
		rows = append(rows, strings.Join([]string{r.Case, r.System, number(r.Units), optional(r.SoldPercent), yes(r.Returns), number(r.Clients), number(r.Processes),
			number(r.Value), r.Unit, number(r.Ratio), number(r.P50), number(r.P99), number(r.Max), number(r.CPU), number(r.Claims), ""}, "	"))
	}
	return rows
}

// designsTable is in Markdown, to be pasted into the decision's record.
func designsTable(records []record) []string {
	rows := []string{"| units | sold | returns | clients | processes | pool rows, claims/s | in place, claims/s | in place ÷ pool |",
		"| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |"}
	for i := 0; i+1 < len(records); i += 2 { // pool and in-place come in pairs
		p, u := records[i], records[i+1]
		rows = append(rows, fmt.Sprintf("| %d | %s %% | %s | %d | %d | %.0f | %.0f | %.2f |",
			p.Units, optional(p.SoldPercent), yes(p.Returns), p.Clients, p.Processes, p.Value, u.Value, u.Value/p.Value))
	}
	return rows
}

func optional(n *int) string {
	if n == nil {
		return ""
	}
	return fmt.Sprint(*n)
}

func yes(b *bool) string {
	if b == nil {
		return ""
	}
	return map[bool]string{true: "yes", false: "no"}[*b]
}

func number[N int | int64 | float64](n N) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("%.6g", float64(n))
}
