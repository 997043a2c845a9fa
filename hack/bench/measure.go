package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"syscall"
	"time"
)

var (
	errEmpty = errors.New("the shelf is empty") // ends a client
	errMiss  = errors.New("nothing this time")  // the client asks again; what it waited counts
	errNone  = errors.New("no client was served")
)

// outcome is what clients saw in one measurement.
type outcome struct {
	Units     int64 // that were there at the beginning, where the scenario does not say
	Done      int
	Misses    int             // tries that found nothing, though units were there
	Returned  int             // units given back meanwhile
	Elapsed   time.Duration   // until the last success
	Latencies []time.Duration // of the successes, sorted
	CPU       time.Duration   // of this process; bench.measure adds that of the servers
}

func (o outcome) rate() float64 { return float64(o.Done) / o.Elapsed.Seconds() }

func (o outcome) percentile(p float64) float64 {
	if len(o.Latencies) == 0 {
		return 0
	}
	return o.Latencies[int(p*float64(len(o.Latencies)-1))].Seconds() * 1000
}

// add joins the outcomes of processes that ran side by side.
func (o *outcome) add(p outcome) {
	o.Done, o.Misses, o.Returned, o.CPU = o.Done+p.Done, o.Misses+p.Misses, o.Returned+p.Returned, o.CPU+p.CPU
	o.Elapsed = max(o.Elapsed, p.Elapsed)
	o.Latencies = append(o.Latencies, p.Latencies...)
	slices.Sort(o.Latencies)
}

// drive runs a closed loop: each client calls op again and again until the window is over or op says errEmpty. Calls in
// flight at the end of the window are waited for and count, so that slow answers are not left out; those that take more
// than another two windows are given up.
func drive(ctx context.Context, clients int, window time.Duration, op func(ctx context.Context, client, n int) error) (outcome, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		ready, wg sync.WaitGroup
		begin     = make(chan struct{})
		overrun   = errors.New("the measurement overran")
		start     time.Time
		each      = make([]outcome, clients)
	)
	for client := range clients {
		ready.Add(1)
		wg.Go(func() {
			ready.Done()
			<-begin
			own, last, asked := &each[client], start, start
			for n := 0; last.Sub(start) < window; n++ {
				err := op(ctx, client, n)
				last = time.Now()
				switch {
				case err == nil:
					own.Done++
					own.Latencies = append(own.Latencies, last.Sub(asked))
					own.Elapsed = last.Sub(start)
					asked = last
				case errors.Is(err, errMiss):
					own.Misses++
				case errors.Is(err, errEmpty):
					return
				default:
					cancel(err) // the first cause stays
					return
				}
			}
		})
	}
	ready.Wait()
	cpu := ownCPU()
	start = time.Now()
	giveUp := time.AfterFunc(3*window, func() { cancel(overrun) })
	close(begin)
	wg.Wait()
	giveUp.Stop()
	total := outcome{CPU: ownCPU() - cpu}
	if err := context.Cause(ctx); err != nil && !errors.Is(err, overrun) {
		return total, err
	}
	for _, o := range each {
		total.Done, total.Misses = total.Done+o.Done, total.Misses+o.Misses
		total.Elapsed = max(total.Elapsed, o.Elapsed)
		total.Latencies = append(total.Latencies, o.Latencies...)
	}
	slices.Sort(total.Latencies)
	if total.Done == 0 {
		return total, errNone
	}
	return total, nil
}

func ownCPU() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // fails only on a bad address
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// measure adds the servers' CPU time to that of the clients.
func (b *bench) measure(ctx context.Context, run func(context.Context) (outcome, error)) (outcome, error) {
	before := b.serverCPU()
	o, err := run(ctx)
	o.CPU += b.serverCPU() - before
	return o, err
}

// median gives the outcome with the median rate.
func median(outcomes []outcome) outcome {
	slices.SortFunc(outcomes, func(a, b outcome) int {
		switch {
		case a.rate() < b.rate():
			return -1
		case a.rate() > b.rate():
			return 1
		}
		return 0
	})
	return outcomes[len(outcomes)/2]
}
