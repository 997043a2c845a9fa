package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
)

var soldPercents = []int{0, 50, 99}

// growth asks whether claims stay as fast with more units, more of them sold, units that come back, more clients who wait,
// and more processes.
func growth(ctx context.Context, b *bench) error {
	sizes := []int64{1000, 100_000}
	if many := b.manyUnits(); many > sizes[1] {
		sizes = append(sizes, many)
	}
	for _, units := range sizes {
		for _, sold := range soldPercents {
			if err := b.growthOf(ctx, units, sold); err != nil {
				return fmt.Errorf("%d units, %d %% sold: %w", units, sold, err)
			}
		}
	}
	for _, clients := range []int{512, 2048, 10_000} {
		if err := b.fresh(ctx, "waiting clients", clients, 1); err != nil {
			return fmt.Errorf("%d clients: %w", clients, err)
		}
	}
	for _, processes := range []int{1, 2, 4} {
		if err := b.fresh(ctx, "processes", 512, processes); err != nil {
			return fmt.Errorf("%d processes: %w", processes, err)
		}
	}
	return b.alone(ctx)
}

// withStore gives a store in a database of its own.
func (b *bench) withStore(ctx context.Context, f func(dsn string, store *inventory.Store) error) error {
	dsn, drop, err := b.scratch(ctx)
	if err != nil {
		return err
	}
	defer drop()
	store, err := openStore(ctx, dsn)
	if err != nil {
		return err
	}
	defer func() { _ = store.Close() }()
	return f(dsn, store)
}

// growthOf prepares one sale and measures copies of it. A copy serves again until a quarter of what was left is taken. The
// fewer units are left, the shorter is a measurement, for it ends when the shelf is empty; so there are more of them.
func (b *bench) growthOf(ctx context.Context, units int64, sold int) error {
	return b.withStore(ctx, func(dsn string, store *inventory.Store) error {
		b.say("growth: preparing %d units, %d %% sold", units, sold)
		prepared, err := newSale(ctx, store, units)
		if err != nil {
			return err
		}
		if err := sell(ctx, store, prepared, units*int64(sold)/100); err != nil {
			return err
		}
		db, err := openSQL(dsn, 1) // the product's pool does not wait for statements that take long
		if err != nil {
			return err
		}
		defer func() { _ = db.Close() }()
		rounds := b.rounds
		if units < 100_000 {
			rounds *= 7
		}
		for _, returns := range []bool{false, true} {
			b.say("growth: %d units, %d %% sold, returns: %t", units, sold, returns)
			var all []outcome
			var sale uuid.UUID
			left := units - units*int64(sold)/100
			taken := left
			for round := range rounds {
				if taken*4 > left {
					if sale, err = cloneSale(ctx, db, prepared); err != nil {
						return err
					}
					taken = 0
				}
				w := wave{System: "flashsale", DSN: dsn, Sale: sale, Name: fmt.Sprintf("bench-%d", round), Clients: 512, Lines: b.lines, Window: b.window * 2 / 5, Returns: returns}
				o, err := b.runWave(ctx, w, 1)
				if err != nil {
					return err
				}
				all = append(all, o)
				taken += int64(o.Done)
			}
			if _, err := audit(ctx, store, sale); err != nil {
				return err
			}
			b.add(record{Scenario: "growth", Case: "units and sold", System: "flashsale", Durable: true, Clients: 512, Units: units, Unit: "claims/s",
				SoldPercent: &sold, Returns: &returns}.of(median(all)))
		}
		return nil
	})
}

// fresh measures claims from a sale of which nothing is sold.
func (b *bench) fresh(ctx context.Context, what string, clients, processes int) error {
	b.say("growth: %d waiting clients, %d processes", clients, processes)
	window := b.window * 2 / 5
	units := int64(1.5 * 60_000 * window.Seconds())
	var all []outcome
	for range b.rounds {
		err := b.withStore(ctx, func(dsn string, store *inventory.Store) error {
			sale, err := newSale(ctx, store, units)
			if err != nil {
				return err
			}
			w := wave{System: "flashsale", DSN: dsn, Sale: sale, Name: "bench", Clients: clients, Lines: b.lines, Window: window}
			o, err := b.runWave(ctx, w, processes)
			if err != nil {
				return err
			}
			all = append(all, o)
			_, err = audit(ctx, store, sale)
			return err
		})
		if err != nil {
			return err
		}
	}
	b.add(record{Scenario: "growth", Case: what, System: "flashsale", Durable: true, Clients: clients, Units: units, Processes: processes,
		Unit: "claims/s"}.of(median(all)))
	return nil
}

// alone compares the claim of a single client with the least that a durable claim can cost: one row, committed.
func (b *bench) alone(ctx context.Context) error {
	const product, bare = "flashsale", "bare-commit"
	ways := map[string]system{product: {open: openFlashsale}, bare: {open: openBareCommit}}
	seen := map[string][]outcome{}
	for range b.rounds {
		for _, name := range []string{product, bare} {
			b.say("growth: one client alone, %s", name)
			o, err := b.claimsOnce(ctx, ways[name], 1)
			if err != nil {
				return errors.Join(fmt.Errorf("one client, %s", name), err)
			}
			seen[name] = append(seen[name], o)
		}
	}
	commits := median(seen[bare])
	for _, name := range []string{product, bare} {
		o := median(seen[name])
		b.add(record{Scenario: "growth", Case: "alone", System: name, Durable: true, Clients: 1, Unit: "claims/s", Ratio: round(o.rate() / commits.rate())}.of(o))
	}
	return nil
}

func openBareCommit(ctx context.Context, b *bench, clients int) (seller, error) {
	db, done, err := openTables(ctx, b, clients, "CREATE TABLE hold (buyer VARCHAR(64) PRIMARY KEY)")
	if err != nil {
		return seller{}, err
	}
	claim := func(ctx context.Context, buyer string) error {
		_, err := db.ExecContext(ctx, "INSERT INTO hold VALUES (?)", buyer) // commits by itself
		return err
	}
	return seller{claim: claim, close: done}, nil
}
