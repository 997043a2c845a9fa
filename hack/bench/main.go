// Command bench measures how fast units are sold: by this product, beside the usual ways to do it with MySQL and Redis,
// on the same machine and the same servers. bench.sh brings the servers up.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const usage = `usage: bench [flags]

Needs FLASHSALE_MYSQL_DSN (user:password@tcp(host:port)/database; the user creates databases <database>_bench_... and drops
them) and, for the claims, FLASHSALE_REDIS_ADDR (host:port of a Redis without keys). hack/bench/bench.sh provides both.

Scenarios:
  claims   claims/s of the product beside six usual ways, at 1 to 2,048 clients
  growth   the product's claims/s by units, share sold, returns, waiting clients and processes
  confirm  claims and then confirmations through the queues
  sweep    100,000 holds lapse together: the sweepers' speed, and when the next buyer has the units
  load     unit rows/s of the loader
  designs  pool rows moved on claim, against unit rows updated in place

Flags:
`

// scenarios in the order they run.
var scenarios = []struct {
	name string
	run  func(context.Context, *bench) error
}{
	{"claims", claims}, {"growth", growth}, {"confirm", confirm}, {"sweep", sweep}, {"load", load}, {"designs", designs},
}

// bench is what the scenarios share.
type bench struct {
	*servers
	*report
	window   time.Duration // of one measurement
	quick    bool
	rounds   int   // how often a measurement is repeated for its median
	clients  []int // at once, of the claims
	lines    int   // queues of claims in a process
	pipeline bool  // Redis commands share round trips
	sweepers int
}

// manyUnits is the size of a large sale.
func (b *bench) manyUnits() int64 {
	if b.quick {
		return 100_000
	}
	return 1_000_000
}

func main() { os.Exit(command(os.Args[1:])) }

func command(args []string) (exitCode int) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400) // as the product's pods; all systems profit, whose clients are goroutines here
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if len(args) == 1 && args[0] == "worker" {
		return exit(worker(ctx))
	}
	var (
		flags    = flag.NewFlagSet("bench", flag.ContinueOnError)
		only     = flags.String("only", "", "scenarios to run, comma separated; default: all")
		asJSON   = flags.Bool("json", false, "print one JSON object per figure, and nothing else, to stdout")
		quick    = flags.Bool("quick", false, "one round, short windows, a tenth of the units: a smoke test, not for figures")
		plotFile = flags.String("plot", "", "draw the claims and the growth into this SVG file")
		seconds  = flags.Float64("seconds", 5, "length of one measurement of claims; 1 with --quick. Others take a part of it")
		rounds   = flags.Int("rounds", 3, "how often each measurement is made; the median counts. 1 with --quick")
		lines    = flags.Int("lines", 2, "queues of claims in one process of the product")
		sweepers = flags.Int("sweepers", 2, "sweepers when holds lapse")
		clients  = flags.String("clients", "1,64,512,2048", "numbers of clients for the claims")
		pipeline = flags.Bool("pipeline", false, "let Redis commands share round trips, which few shops do")
	)
	flags.Usage = func() { _, _ = fmt.Fprint(flags.Output(), usage); flags.PrintDefaults() }
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if *quick && !isSet(flags, "seconds") {
		*seconds = 1
	}
	if *quick && !isSet(flags, "rounds") {
		*rounds = 1
	}
	chosen, err := choose(*only)
	switch {
	case err != nil:
	case flags.NArg() > 0:
		err = fmt.Errorf("unknown argument %q", flags.Arg(0))
	case *seconds <= 0 || *rounds < 1 || *lines < 1 || *sweepers < 1:
		err = errors.New("--seconds, --rounds, --lines and --sweepers must be positive")
	}
	b := &bench{report: &report{json: *asJSON, begin: time.Now()}, window: time.Duration(*seconds * float64(time.Second)),
		quick: *quick, rounds: *rounds, lines: *lines, sweepers: *sweepers, pipeline: *pipeline}
	for text := range strings.SplitSeq(*clients, ",") {
		n, bad := strconv.Atoi(text)
		if bad != nil || n < 1 {
			err = fmt.Errorf("--clients must be numbers separated by commas, not %q", *clients)
		}
		b.clients = append(b.clients, n)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v; --help lists the flags\n", err)
		return 2
	}
	return exit(b.run(ctx, chosen, *plotFile))
}

func exit(err error) int {
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		return 1
	}
	return 0
}

func isSet(flags *flag.FlagSet, name string) (set bool) {
	flags.Visit(func(f *flag.Flag) { set = set || f.Name == name })
	return set
}

// choose gives the names of the scenarios to run.
func choose(only string) ([]string, error) {
	var all []string
	for _, s := range scenarios {
		all = append(all, s.name)
	}
	if only == "" {
		return all, nil
	}
	chosen := strings.Split(only, ",")
	for _, name := range chosen {
		if !slices.Contains(all, name) {
			return nil, fmt.Errorf("no scenario %q: there are %s", name, strings.Join(all, ", "))
		}
	}
	return chosen, nil
}

func (b *bench) run(ctx context.Context, chosen []string, plotFile string) (err error) {
	if b.servers, err = connect(ctx, slices.Contains(chosen, "claims")); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.header(ctx, b.servers); err != nil {
		return err
	}
	for _, s := range scenarios {
		if !slices.Contains(chosen, s.name) {
			continue
		}
		begin := time.Now()
		if one := s.run(ctx, b); ctx.Err() != nil {
			return errors.New("interrupted")
		} else if one != nil {
			b.say("%s FAILED: %v", s.name, one)
			err = errors.Join(err, fmt.Errorf("%s: %w", s.name, one)) // the others are run all the same
		}
		b.say("%s took %s", s.name, time.Since(begin).Round(time.Second))
		b.table(s.name)
	}
	if plotFile == "" {
		return err
	}
	return errors.Join(err, plotRecords(plotFile, b.records))
}
