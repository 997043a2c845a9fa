package main

// What happens to units before and after the claim: load, confirm, sweep.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
)

// load measures the loader.
func load(ctx context.Context, b *bench) error {
	units := b.manyUnits()
	var all []outcome
	for range b.rounds {
		b.say("load: %d units", units)
		err := b.withStore(ctx, func(_ string, store *inventory.Store) error {
			o, err := b.measure(ctx, func(ctx context.Context) (outcome, error) {
				begin, cpu := time.Now(), ownCPU()
				_, err := newSale(ctx, store, units)
				return outcome{Done: int(units), Elapsed: time.Since(begin), CPU: ownCPU() - cpu}, err
			})
			all = append(all, o)
			return err
		})
		if err != nil {
			return err
		}
	}
	b.add(record{Scenario: "load", System: "flashsale", Durable: true, Clients: 1, Units: units, Unit: "rows/s"}.of(median(all)))
	return nil
}

// confirm measures claims, and then the confirmations of the same reservations by the same clients.
func confirm(ctx context.Context, b *bench) error {
	for _, clients := range []int{512, 2048} {
		var claimed, confirmed []outcome
		for range b.rounds {
			b.say("confirm: %d clients", clients)
			c, p, err := b.claimAndConfirm(ctx, clients)
			if err != nil {
				return fmt.Errorf("%d clients: %w", clients, err)
			}
			claimed, confirmed = append(claimed, c), append(confirmed, p)
		}
		c, p := median(claimed), median(confirmed)
		of := record{Scenario: "confirm", System: "flashsale", Durable: true, Clients: clients, Units: b.plenty()}
		of.Case, of.Unit = "claim", "claims/s"
		b.add(of.of(c))
		of.Case, of.Unit, of.Ratio = "confirm", "confirms/s", round(p.rate()/c.rate())
		b.add(of.of(p))
	}
	return nil
}

// plenty is more units than can be sold in a window.
func (b *bench) plenty() int64 { return int64(1.5 * 60_000 * b.window.Seconds()) }

func (b *bench) claimAndConfirm(ctx context.Context, clients int) (claimed, confirmed outcome, err error) {
	err = b.withStore(ctx, func(dsn string, store *inventory.Store) (err error) {
		sale, err := newSale(ctx, store, b.plenty())
		if err != nil {
			return err
		}
		e, err := openEngine(ctx, dsn, sale, "bench", b.lines)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, e.close()) }()
		own := make([][]uuid.UUID, clients)
		claimed, err = b.measure(ctx, func(ctx context.Context) (outcome, error) {
			return drive(ctx, clients, b.window, func(ctx context.Context, client, n int) error {
				r, err := e.claim(ctx, fmt.Sprintf("buyer-%d-%d", client, n))
				if err == nil {
					own[client] = append(own[client], r)
				}
				return err
			})
		})
		if err != nil {
			return err
		}
		confirmed, err = b.measure(ctx, func(ctx context.Context) (outcome, error) {
			return drive(ctx, clients, b.window, func(ctx context.Context, client, n int) error {
				if n == len(own[client]) {
					return errEmpty
				}
				return e.confirm(ctx, own[client][n])
			})
		})
		if err != nil {
			return err
		}
		_, err = audit(ctx, store, sale)
		return err
	})
	return claimed, confirmed, err
}

// lapsing is how many holds lapse.
func (b *bench) lapsing() int { return int(b.manyUnits() / 10) }

const (
	sweepBatch    = 4000        // as the product's sweeper
	sweepInterval = time.Second // as the product's sweeper
)

// sweep lets 100,000 holds lapse in one instant: once with sweepers alone, once with buyers who ask all the time.
func sweep(ctx context.Context, b *bench) error {
	var sweeps, plain, buyers []outcome
	for range b.rounds {
		b.say("sweep: %d holds, %d sweepers", b.lapsing(), b.sweepers)
		o, err := b.lapse(ctx, 0)
		if err != nil {
			return err
		}
		// The speed counts from the end of the first sweep that found something, without what that one found.
		busy := o
		first := o.Latencies[0]
		busy.Elapsed -= first
		for busy.Done > 0 && o.Latencies[o.Done-busy.Done] == first {
			busy.Done--
		}
		sweeps, plain = append(sweeps, busy), append(plain, o)
		b.say("sweep: the same, and 512 buyers")
		if o, err = b.lapse(ctx, 512); err != nil {
			return err
		}
		buyers = append(buyers, o)
	}
	base := record{Scenario: "sweep", System: "flashsale", Durable: true, Units: int64(b.lapsing())}
	r := base
	r.Case, r.Unit = "sweepers alone: speed", "units/s"
	r = r.of(median(sweeps))
	r.P50, r.P99, r.CPU = 0, 0, 0
	b.add(r)
	for _, c := range []struct {
		what     string
		clients  int
		outcomes []outcome
	}{{"sweepers alone: lapse to available", 0, plain}, {"with buyers: lapse to held by the next buyer", 512, buyers}} {
		o := median(c.outcomes)
		r := base
		r.Case, r.Clients = c.what, c.clients
		r = r.of(o)
		r.Value, r.Unit = r.P99, "ms (p99)"
		r.Max = round(o.percentile(1))
		b.add(r)
	}
	return nil
}

// lapse gives, per unit, the time from the lapse until a sweeper had it back, or, with buyers, until the next buyer held it.
// Buyers who are refused ask again after 5 ms, so that is how exact their times are.
func (b *bench) lapse(ctx context.Context, buyers int) (o outcome, err error) {
	err = b.withStore(ctx, func(dsn string, store *inventory.Store) (err error) {
		sale, err := newSale(ctx, store, int64(b.lapsing()))
		if err != nil {
			return err
		}
		e, err := openEngine(ctx, dsn, sale, "bench", b.lines)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, e.close()) }()
		db, err := openSQL(dsn, 1)
		if err != nil {
			return err
		}
		defer func() { _ = db.Close() }()
		// Every unit gets a hold of its own.
		_, err = drive(ctx, 512, time.Minute, func(ctx context.Context, client, n int) error {
			_, err := e.claim(ctx, fmt.Sprintf("first-%d-%d", client, n))
			return err
		})
		if err != nil {
			return err
		}
		at, err := lapseTogether(ctx, db, store, sale, 8*time.Second)
		if err != nil {
			return err
		}
		time.Sleep(time.Until(at.Add(-time.Second / 2))) // let the server come to rest
		o, err = b.measure(ctx, func(ctx context.Context) (outcome, error) { return b.takeBack(ctx, e, at, buyers) })
		if err != nil {
			return err
		}
		report, err := audit(ctx, store, sale)
		if err == nil && buyers == 0 && report.Available != int64(b.lapsing()) {
			err = fmt.Errorf("%d of %d units are available after the sweep", report.Available, b.lapsing())
		}
		return err
	})
	return o, err
}

// takeBack runs the sweepers, and the buyers, until all units are available, or held by those buyers.
func (b *bench) takeBack(ctx context.Context, e *engine, at time.Time, buyers int) (outcome, error) {
	ctx, done := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("not all units came back"))
	defer done()
	var (
		mu     sync.Mutex
		o      outcome
		failed error
		wg     sync.WaitGroup
	)
	// came notes n units; the last one ends all loops.
	came := func(n int) {
		mu.Lock()
		defer mu.Unlock()
		since := time.Since(at)
		for range n {
			o.Latencies = append(o.Latencies, since)
		}
		if o.Done += n; o.Done == b.lapsing() {
			o.Elapsed = since
			done()
		}
	}
	fail := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() == nil { // else it is an echo of the end
			failed = errors.Join(failed, err)
		}
		done()
	}
	cpu := ownCPU()
	for i := range b.sweepers {
		wg.Go(func() {
			for ctx.Err() == nil {
				n, wait, err := e.sweep(ctx, i, sweepBatch, sweepInterval)
				if err != nil {
					fail(err)
					return
				}
				if buyers == 0 && n > 0 {
					came(n)
				}
				pause(ctx, wait)
			}
		})
	}
	for client := range buyers {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				_, err := e.claim(ctx, fmt.Sprintf("next-%d-%d", client, n))
				switch {
				case err == nil:
					came(1)
				case errors.Is(err, errEmpty), errors.Is(err, errMiss):
					pause(ctx, 5*time.Millisecond)
				default:
					fail(err)
					return
				}
			}
		})
	}
	wg.Wait()
	o.CPU = ownCPU() - cpu
	slices.Sort(o.Latencies)
	if o.Done != b.lapsing() {
		return o, errors.Join(failed, fmt.Errorf("%d of %d units came back: %w", o.Done, b.lapsing(), context.Cause(ctx)))
	}
	return o, failed
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
