// Command reserver is what runs in the pods of a sale: the HTTP service that claims units, the sweeper that takes
// expired holds back and tells the shop's webhook, and the audit that proves from the rows that nothing was lost or sold twice.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/peterbourgon/ff/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"flashsale.dev/operator/reserver/httpapi"
	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/reserver/webhook"
)

const usage = `usage: reserver COMMAND [flags]

commands:
  serve   answer shoppers and the checkout over HTTP for one sale
  sweep   take expired holds back and post events to a webhook, for one sale, until stopped
  audit   prove the invariants of one sale, or of all, from the rows; prints JSON
  keys    print new keys for "serve --keys", as JSON; with --rotate=FILE, those that follow on the file's
  repair  make the running counts of one sale equal its rows again, while it goes on; prints what was changed, as JSON

Every flag can be given as an environment variable, FLASHSALE_ and its name in capitals: --sale-id is FLASHSALE_SALE_ID.
The database's credentials come from files only. "reserver COMMAND --help" lists a command's flags.

exit codes: 0 well, 1 an invariant is broken (audit) or the command failed, 2 wrong usage
`

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) (exitCode int) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	commands := map[string]func(context.Context, []string) error{"serve": serve, "sweep": sweep, "audit": audit, "repair": repair, "keys": printKeys}
	command, known := commands[args[0]]
	switch {
	case args[0] == "--help" || args[0] == "-h" || args[0] == "help":
		fmt.Print(usage)
		return 0
	case !known:
		fmt.Fprintf(os.Stderr, "reserver: unknown command %q\n\n%s", args[0], usage)
		return 2
	}
	err := command(ctx, args[1:])
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return 0
	}
	fmt.Fprintf(os.Stderr, "reserver %s: %v\n", args[0], err)
	var wrong usageError
	if errors.As(err, &wrong) {
		return 2
	}
	return 1
}

type usageError string

func (e usageError) Error() string { return string(e) }

// common are the flags of every command.
type common struct {
	flags    *flag.FlagSet
	database string
	saleText string
	sale     uuid.UUID
	log      *slog.Logger
	held     *prometheus.HistogramVec // nil in commands without metrics
}

func newCommon(name string) *common {
	c := &common{flags: flag.NewFlagSet("reserver "+name, flag.ContinueOnError), log: slog.New(slog.NewJSONHandler(os.Stderr, nil))}
	c.flags.StringVar(&c.database, "database", "/etc/flashsale/database", "folder of a mounted Secret (dsn; or host, port, username, password, database; and ca.crt), or a file holding a DSN")
	c.flags.StringVar(&c.saleText, "sale-id", "", "UID of the FlashSale object")
	return c
}

func (c *common) parse(args []string, saleRequired bool) error {
	if err := ff.Parse(c.flags, args, ff.WithEnvVarPrefix("FLASHSALE")); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return usageError(err.Error())
	}
	if c.flags.NArg() > 0 {
		return usageError(fmt.Sprintf("unexpected argument %q", c.flags.Arg(0)))
	}
	if c.saleText == "" && !saleRequired {
		return nil
	}
	var err error
	if c.sale, err = uuid.Parse(c.saleText); err != nil {
		return usageError(fmt.Sprintf("--sale-id must be the UID of a FlashSale object, not %q", c.saleText))
	}
	return nil
}

func (c *common) open(maxConns int) (*inventory.Store, error) {
	options, err := inventory.OptionsFromPath(c.database)
	if err != nil {
		return nil, err
	}
	options.MaxConns = maxConns
	if c.held != nil {
		options.OnHold = func(caller string, d time.Duration) { c.held.WithLabelValues(caller).Observe(d.Seconds()) }
	}
	return inventory.Open(options)
}

// connect opens the database once it is fit for the sale; it returns nil when the context ends before. Faults are waited
// out, and the Secret is read again each time: a pod that ended instead would be restarted ever more slowly, and come
// late when the database is back.
func (c *common) connect(ctx context.Context, maxConns int) *inventory.Store {
	last := ""
	for {
		store, err := c.open(maxConns)
		if err == nil {
			var warning *inventory.SetupError
			if warning, err = store.Check(ctx); err == nil {
				err = store.Probe(ctx)
			}
			if err == nil {
				if warning != nil {
					c.log.Warn(warning.Message, "reason", warning.Reason)
				}
				return store
			}
			_ = store.Close()
		}
		if ctx.Err() != nil {
			return nil
		}
		if err.Error() != last {
			last = err.Error()
			c.log.Error("the database is not fit for use, will keep trying", "error", err)
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil
		}
	}
}

func serve(ctx context.Context, args []string) error {
	c := newCommon("serve")
	var (
		listen   = c.flags.String("listen", ":8080", "address of the API")
		admin    = c.flags.String("admin", ":9090", "address of /healthz, /readyz and /metrics")
		pod      = c.flags.String("pod", hostname(), "name of this process, unique within the sale")
		maxConns = c.flags.Int("max-connections", 16, "connections to the database")
		unready  = c.flags.Duration("unready-for", 5*time.Second, "on shutdown, how long to go on serving after readiness went off, so that the Service has stopped sending")
		grace    = c.flags.Duration("grace", 15*time.Second, "on shutdown, how long requests in flight may take after that")
	)
	admit := newAdmitFlags(c.flags)
	if err := c.parse(args, true); err != nil {
		return err
	}
	if err := admit.check(); err != nil {
		return err
	}
	if os.Getenv("GOGC") == "" {
		// The heap is small and the requests in flight are many: at the default, a fifth of the time goes to scanning their
		// stacks again and again.
		debug.SetGCPercent(400)
	}
	registry := c.newRegistry()
	health := &httpapi.Admin{Registry: registry}
	stopAdmin, err := listenAndServe(*admin, health, c.log)
	if err != nil {
		return err
	}
	defer stopAdmin(context.Background())
	store := c.connect(ctx, *maxConns)
	if store == nil {
		return nil
	}
	defer func() { _ = store.Close() }()
	running, stopRunning := context.WithCancel(context.Background())
	defer stopRunning()
	config, err := admit.config(running, c.log)
	if err != nil {
		return err
	}
	config.Pod = *pod
	api := httpapi.New(store, c.sale, config, registry, c.log)
	health.SetReady(api.Ready)
	var wg sync.WaitGroup
	wg.Go(func() { api.Run(running) })
	stopAPI, err := listenAndServe(*listen, api.Handler(), c.log)
	if err != nil {
		stopRunning()
		wg.Wait()
		return err
	}
	c.log.Info("serving", "sale", c.sale, "address", *listen)

	<-ctx.Done()
	c.log.Info("shutting down: readiness off", "seconds", unready.Seconds())
	api.BeginShutdown()
	time.Sleep(*unready)
	ending, cancel := context.WithTimeout(context.Background(), *grace)
	defer cancel()
	stopAPI(ending)
	stopRunning()
	wg.Wait()
	c.log.Info("stopped")
	return nil
}

// listenAndServe serves in the background; the function it gives waits for requests in flight.
func listenAndServe(address string, handler http.Handler, log *slog.Logger) (stop func(context.Context), err error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      20 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Error("stopped serving", "address", address, "error", err)
		}
	}()
	return func(ctx context.Context) {
		if err := server.Shutdown(ctx); err != nil {
			log.Warn("ended with requests in flight", "address", address, "error", err)
		}
	}, nil
}

func sweep(ctx context.Context, args []string) error {
	c := newCommon("sweep")
	var (
		admin    = c.flags.String("admin", ":9090", "address of /healthz, /readyz and /metrics")
		name     = c.flags.String("pod", hostname(), "name of this process, unique within the sale")
		interval = c.flags.Duration("interval", time.Second, "time between two looks for expired holds")
		batch    = c.flags.Int("batch-size", 4000, "holds that one transaction takes back")
		url      = c.flags.String("webhook-url", "", "where events are posted; without one they are dropped")
		secret   = c.flags.String("webhook-secret", "", "file with the key that signs events: whsec_ and base64")
	)
	if err := c.parse(args, true); err != nil {
		return err
	}
	if *interval <= 0 || *batch < 1 || *batch > 5000 {
		return usageError("--interval must be positive and --batch-size between 1 and 5000")
	}
	if *url != "" && *secret == "" {
		return usageError("--webhook-url needs --webhook-secret")
	}
	registry := c.newRegistry()
	swept := prometheus.NewCounter(prometheus.CounterOpts{Name: "flashsale_swept_holds_total", Help: "Expired holds taken back."})
	registry.MustRegister(swept)
	health := &httpapi.Admin{Registry: registry}
	stopAdmin, err := listenAndServe(*admin, health, c.log)
	if err != nil {
		return err
	}
	defer stopAdmin(context.Background())
	store := c.connect(ctx, 4)
	if store == nil {
		return nil
	}
	defer func() { _ = store.Close() }()
	if *url != "" {
		publisher := &webhook.Publisher{Store: store, Sale: c.sale, URL: *url, SecretFile: *secret, Log: c.log}
		var publishing sync.WaitGroup
		publishing.Go(func() { publisher.Run(ctx, registry) })
		defer publishing.Wait()
	}
	var last atomic.Pointer[error] // of the last sweep
	health.SetReady(func() error {
		if err := last.Load(); err != nil {
			return *err
		}
		return nil
	})
	c.log.Info("sweeping", "sale", c.sale, "interval", interval.String())
	for {
		wait := *interval
		once, cancel := context.WithTimeout(ctx, 10*time.Second)
		n, err := store.Sweep(once, c.sale, "sweeper/"+*name, *batch)
		if err == nil && n == 0 {
			var snap *inventory.Snapshot
			if snap, err = store.Announce(once, c.sale); err == nil {
				wait = snap.UntilLapse(wait)
			}
			if err == nil && *url == "" {
				err = store.DiscardEvents(once, c.sale)
			}
		}
		cancel()
		switch {
		case ctx.Err() != nil:
			c.log.Info("stopped")
			return nil
		case err != nil:
			if last.Swap(&err) == nil {
				c.log.Warn("could not sweep, will keep trying", "error", err)
			}
		case last.Swap(nil) != nil:
			c.log.Info("swept again")
		}
		if n > 0 {
			swept.Add(float64(n))
			c.log.Info("took expired holds back", "holds", n)
			continue // there may be more
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// audit prints a report per sale, as one JSON document each.
func audit(ctx context.Context, args []string) error {
	c := newCommon("audit")
	if err := c.parse(args, false); err != nil {
		return err
	}
	store, err := c.open(2)
	if err != nil {
		return err
	}
	defer func() { _ = store.Close() }()
	sales := []uuid.UUID{c.sale}
	if c.saleText == "" {
		if sales, err = store.Sales(ctx); err != nil {
			return err
		}
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	broken := 0
	for _, sale := range sales {
		report, err := store.Audit(ctx, sale)
		if err != nil {
			return fmt.Errorf("auditing sale %s: %w", sale, err)
		}
		if err := out.Encode(report); err != nil {
			return err
		}
		broken += len(report.Failed())
	}
	if broken > 0 {
		return fmt.Errorf("%d checks failed; the reports name the rows", broken)
	}
	return nil
}

// repair prints by how much the counts were wrong.
func repair(ctx context.Context, args []string) error {
	c := newCommon("repair")
	if err := c.parse(args, true); err != nil {
		return err
	}
	store, err := c.open(2)
	if err != nil {
		return err
	}
	defer func() { _ = store.Close() }()
	changed, err := store.Repair(ctx, c.sale)
	if err != nil {
		return fmt.Errorf("repairing sale %s: %w", c.sale, err)
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"sale": c.sale, "changed": changed})
}

// newRegistry makes the metrics that every long-running command has.
func (c *common) newRegistry() *prometheus.Registry {
	c.held = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "flashsale_connection_hold_seconds",
		Help: "How long a transaction had a database connection, by caller.", Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14)}, []string{"caller"})
	registry := prometheus.NewRegistry()
	registry.MustRegister(c.held, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return registry
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return fmt.Sprintf("pid-%d", os.Getpid())
	}
	return name
}
