package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"time"
)

// fault is one kind of harm. inject does it for a time, ends it, and says what it did; ending must leave nothing behind but
// processes that run and connections that work.
type fault struct {
	name   string
	inject func(ctx context.Context, r *round, f planned) error
}

// planned is a fault of a round's plan.
type planned struct {
	*fault
	at, lasts time.Duration
	target    int // which of the processes
}

// skewed is not injected: the round's first two reservers have wrong clocks.
var skewed = &fault{"skewed clocks", nil}

var faults = []*fault{
	{"no fault", nil},
	skewed,
	{"MySQL killed", func(ctx context.Context, r *round, _ planned) error {
		return r.restartServer(ctx)
	}},
	{"MySQL restarted with REPEATABLE READ", func(ctx context.Context, r *round, _ planned) error {
		if err := r.server.setIsolation(ctx, "REPEATABLE-READ"); err != nil {
			return err
		}
		err := r.restartServer(ctx)
		if err == nil {
			err = eventually(ctx, time.Minute, "the server's default is REPEATABLE READ", func() error {
				level, err := r.server.isolation(ctx)
				if err == nil && level != "REPEATABLE-READ" {
					err = errors.New(level)
				}
				return err
			})
		}
		r.putBack = func() error { return r.server.setIsolation(context.WithoutCancel(ctx), "READ-COMMITTED") }
		return err
	}},
	{"MySQL stopped", func(ctx context.Context, r *round, f planned) error {
		pid, err := r.server.signal(ctx, syscall.SIGSTOP)
		if err != nil {
			return err
		}
		pause(ctx, f.lasts)
		if err := syscall.Kill(pid, syscall.SIGCONT); !errors.Is(err, syscall.ESRCH) { // the round's other fault killed it
			return err
		}
		return nil
	}},
	{"reserver killed", func(ctx context.Context, r *round, f planned) error {
		return r.restart(ctx, r.reservers[f.target%len(r.reservers)], f.lasts)
	}},
	{"sweeper killed", func(ctx context.Context, r *round, f planned) error {
		return r.restart(ctx, r.sweepers[f.target%len(r.sweepers)], f.lasts)
	}},
	{"reserver stopped", func(ctx context.Context, r *round, f planned) error {
		p := r.reservers[f.target%len(r.reservers)]
		if err := p.signal(syscall.SIGSTOP); err != nil {
			return err
		}
		pause(ctx, f.lasts)
		return p.signal(syscall.SIGCONT)
	}},
	{"connections cut", func(ctx context.Context, r *round, f planned) error {
		p := r.reservers[f.target%len(r.reservers)].proxy
		p.Stop()
		pause(ctx, f.lasts)
		return p.Start()
	}},
	toxic("connections reset", "reset_peer", "downstream", map[string]any{"timeout": 0}),
	toxic("network silent", "timeout", "downstream", map[string]any{"timeout": 0}),
	toxic("network slow", "latency", "downstream", map[string]any{"latency": 120, "jitter": 100}),
	toxic("network narrow", "bandwidth", "downstream", map[string]any{"rate": 2}),
	toxic("connection lost before COMMIT", "commit", "upstream", map[string]any{"after": false}),
	toxic("connection lost after COMMIT", "commit", "upstream", map[string]any{"after": true}),
}

// toxic poisons the connections of all reservers and sweepers but one.
func toxic(name, kind, direction string, attributes map[string]any) *fault {
	return &fault{name, func(ctx context.Context, r *round, f planned) error {
		for i, p := range r.pods() {
			if i == f.target%len(r.reservers) {
				continue
			}
			if err := p.proxy.poison(name, kind, direction, attributes); err != nil {
				return fmt.Errorf("poisoning the connections of %s: %w", p.name, err)
			}
			defer p.proxy.heal(name)
		}
		pause(ctx, f.lasts)
		return nil
	}}
}

// restartServer kills MySQL, and waits until its keeper has it up again.
func (r *round) restartServer(ctx context.Context) error {
	if _, err := r.server.signal(ctx, syscall.SIGKILL); err != nil {
		return err
	}
	return r.server.awake(ctx)
}

func (r *round) restart(ctx context.Context, p *pod, after time.Duration) error {
	p.kill()
	pause(ctx, after)
	return p.start()
}

// plan is what a round does. It follows from the seed and the round's number alone.
type plan struct {
	seed   uint64
	number int

	units     int
	limit     int
	ttl       time.Duration
	endsAfter time.Duration // zero: the sale has no end
	reservers int
	sweepers  int
	clients   int
	skewed    bool
	faults    []planned
}

// makePlan deals the faults like cards, so that every one comes once in as many rounds as there are faults. Most rounds add a
// second one at random.
func makePlan(seed uint64, number int) plan {
	deck := dice(seed).Perm(len(faults))
	rng := dice(seed, number)
	p := plan{seed: seed, number: number,
		units: 1 + rng.IntN(12), limit: 1 + rng.IntN(3), ttl: []time.Duration{2 * time.Second, 10 * time.Minute}[rng.IntN(2)],
		reservers: 3 + rng.IntN(2), sweepers: 1 + rng.IntN(2), clients: 8 + rng.IntN(9)}
	if rng.IntN(5) == 0 {
		p.endsAfter = 1500*time.Millisecond + within(rng, time.Second)
	}
	chosen := []*fault{faults[deck[number%len(deck)]]}
	if second := faults[rng.IntN(len(faults))]; chosen[0].name != "no fault" && second.name != "no fault" && second != chosen[0] {
		chosen = append(chosen, second)
	}
	p.skewed = len(chosen) > 1 && rng.IntN(4) == 0
	for i, f := range chosen {
		p.skewed = p.skewed || f == skewed
		if f.inject != nil {
			p.faults = append(p.faults, planned{fault: f, target: rng.IntN(12),
				at: time.Duration(100+700*i)*time.Millisecond + within(rng, 600*time.Millisecond), lasts: 500*time.Millisecond + within(rng, 2*time.Second)})
		}
	}
	return p
}

// names of the plan's faults.
func (p plan) names() []string {
	var names []string
	if p.skewed {
		names = append(names, skewed.name)
	}
	for _, f := range p.faults {
		names = append(names, f.name)
	}
	if names == nil {
		names = append(names, faults[0].name)
	}
	return names
}

// String says what the round does, and when.
func (p plan) String() string {
	s := fmt.Sprintf("%d units, hold %v, limit %d, %d clients, %d reservers, %d sweepers", p.units, p.ttl, p.limit, p.clients, p.reservers, p.sweepers)
	if p.endsAfter > 0 {
		s += fmt.Sprintf(", ends after %.1f s", p.endsAfter.Seconds())
	}
	if p.skewed {
		s += "; " + skewed.name
	}
	for _, f := range p.faults {
		s += fmt.Sprintf("; %s at %.1f s", f.name, f.at.Seconds())
		if f.name != "MySQL killed" && f.name != "MySQL restarted with REPEATABLE READ" {
			s += fmt.Sprintf(" for %.1f s", f.lasts.Seconds())
		}
	}
	if len(p.faults) == 0 && !p.skewed {
		s += "; no fault"
	}
	return s
}

// dice give the same throws for the same numbers, and others for numbers nearby.
func dice(seed uint64, numbers ...int) *rand.Rand {
	return rand.New(rand.NewChaCha8(sha256.Sum256(fmt.Append(nil, seed, numbers))))
}

// within is a random duration below most.
func within(rng *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(rng.Int64N(int64(most)))
}
