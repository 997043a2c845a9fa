package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// system is a way to sell units, one claim at a time for fresh buyers.
type system struct {
	name    string
	durable bool // an answered claim survives a crash
	open    func(ctx context.Context, b *bench, clients int) (seller, error)
}

// seller is a system that is ready to sell.
type seller struct {
	claim func(ctx context.Context, buyer string) error
	units int64                           // that it started with
	check func(ctx context.Context) error // may be nil; after the last claim
	close func()
}

// systems, with the one that the others are compared with first.
var systems = []system{
	{"flashsale", true, openFlashsale},
	{"counter-update", true, openCounter(false)},
	{"counter-for-update", true, openCounter(true)},
	{"skip-locked", true, openSkipLocked},
	{"redis-decr", false, openRedisDecr},
	{"redis-lua", false, openRedisLua},
	{"redis-ledger", true, openRedisLedger}, // the ledger is; the counter in Redis is not
}

// claims runs all systems in turn, round by round, so that what else happens on the machine hits all of them.
func claims(ctx context.Context, b *bench) error {
	type key struct {
		clients int
		system  string
	}
	seen := map[key][]outcome{}
	rounds := b.rounds
	for round := range rounds {
		for _, clients := range b.clients {
			for _, s := range systems {
				b.say("claims: round %d of %d, %d clients, %s", round+1, rounds, clients, s.name)
				o, err := b.claimsOnce(ctx, s, clients)
				if err != nil {
					return fmt.Errorf("%s, %d clients: %w", s.name, clients, err)
				}
				seen[key{clients, s.name}] = append(seen[key{clients, s.name}], o)
			}
		}
	}
	for _, clients := range b.clients {
		for _, s := range systems {
			b.add(record{Scenario: "claims", System: s.name, Durable: s.durable, Clients: clients, Unit: "claims/s"}.
				of(median(seen[key{clients, s.name}])))
		}
	}
	return nil
}

func (b *bench) claimsOnce(ctx context.Context, s system, clients int) (outcome, error) {
	open, err := s.open(ctx, b, clients)
	if err != nil {
		return outcome{}, err
	}
	defer open.close()
	o, err := b.measure(ctx, func(ctx context.Context) (outcome, error) {
		return drive(ctx, clients, b.window, func(ctx context.Context, client, n int) error {
			err := open.claim(ctx, fmt.Sprintf("buyer-%d-%d", client, n))
			if errors.Is(err, errEmpty) {
				return errors.New("the stock was too small for the window")
			}
			return err
		})
	})
	if err == nil && open.check != nil {
		err = open.check(ctx)
	}
	o.Units = open.units
	return o, err
}

func openFlashsale(ctx context.Context, b *bench, clients int) (seller, error) {
	// More than the engine can sell: its rate grows with the clients, up to a limit.
	units := int64(1.5 * b.window.Seconds() * float64(min(60_000, 5_000*clients)))
	dsn, drop, err := b.scratch(ctx)
	if err != nil {
		return seller{}, err
	}
	store, err := openStore(ctx, dsn)
	if err != nil {
		drop()
		return seller{}, err
	}
	closeStore := func() { _ = store.Close(); drop() }
	sale, err := newSale(ctx, store, units)
	if err != nil {
		closeStore()
		return seller{}, err
	}
	e, err := openEngine(ctx, dsn, sale, "bench", b.lines)
	if err != nil {
		closeStore()
		return seller{}, err
	}
	return seller{
		units: units,
		claim: func(ctx context.Context, buyer string) error {
			_, err := e.claim(ctx, buyer)
			return err
		},
		check: func(ctx context.Context) error { _, err := audit(ctx, store, sale); return err },
		close: func() { _ = e.close(); closeStore() },
	}, nil
}

// holdTime is how long the systems' holds last: longer than any measurement.
const holdTime = 10 * time.Minute
