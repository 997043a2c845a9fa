package main

// All that the benchmark uses of the product is in this file.

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/admission"
	"flashsale.dev/operator/reserver/inventory"
)

const (
	places   = 20_000 // that wait in a queue; more than there are clients
	maxConns = 16     // of a pod
)

// newQueue runs one of the product's queues. stop ends it.
func newQueue[Q, A any](serves ...admission.Serve[Q, A]) (queue *admission.Queue[Q, A], stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	queue = admission.NewQueue(places, func(Q) int { return 1 }, serves...)
	done := make(chan struct{})
	go func() { queue.Run(ctx); close(done) }()
	return queue, func() { cancel(); <-done }
}

// engine is the product without HTTP and Kubernetes, wired as in a reservation pod.
type engine struct {
	store    *inventory.Store
	sale     uuid.UUID
	name     string // unique among the processes that sell
	claims   *admission.Queue[inventory.Request, inventory.Result]
	pay      *admission.Queue[inventory.Payment, inventory.Settlement]
	releases *admission.Queue[uuid.UUID, inventory.Settlement]
	stop     func()
}

// openStore opens the product's store, with its tables.
func openStore(ctx context.Context, dsn string) (*inventory.Store, error) {
	store, err := inventory.Open(inventory.Options{DSN: dsn, MaxConns: maxConns})
	if err != nil {
		return nil, err
	}
	warning, err := store.Setup(ctx)
	if err == nil && warning != nil {
		err = warning // a server that is not set up as the product wants it would not be worth measuring
	}
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return store, nil
}

func openEngine(ctx context.Context, dsn string, sale uuid.UUID, name string, lines int) (*engine, error) {
	store, err := openStore(ctx, dsn)
	if err != nil {
		return nil, err
	}
	e := &engine{store: store, sale: sale, name: name}
	var claims []admission.Serve[inventory.Request, inventory.Result]
	var pays []admission.Serve[inventory.Payment, inventory.Settlement]
	for i := range lines {
		line, desk := inventory.NewLine(fmt.Sprintf("%s/claim-%d", name, i)), fmt.Sprintf("%s/confirm-%d", name, i)
		claims = append(claims, func(ctx context.Context, batch []inventory.Request) ([]inventory.Result, error) {
			return store.Claim(ctx, sale, line, batch)
		})
		pays = append(pays, func(ctx context.Context, batch []inventory.Payment) ([]inventory.Settlement, error) {
			return store.Confirm(ctx, sale, desk, batch)
		})
	}
	var stopClaims, stopPay, stopReleases func()
	e.claims, stopClaims = newQueue(claims...)
	e.pay, stopPay = newQueue(pays...)
	e.releases, stopReleases = newQueue(func(ctx context.Context, batch []uuid.UUID) ([]inventory.Settlement, error) {
		return store.Release(ctx, sale, name+"/release", batch)
	})
	e.stop = func() { stopClaims(); stopPay(); stopReleases() }
	return e, nil
}

func (e *engine) close() error {
	e.stop()
	return e.store.Close()
}

// claim takes one unit for a buyer.
func (e *engine) claim(ctx context.Context, buyer string) (uuid.UUID, error) {
	result, err := e.claims.Ask(ctx, inventory.Request{Buyer: buyer, Quantity: 1})
	if err != nil {
		return uuid.Nil, err
	}
	switch result.Outcome {
	case inventory.OutcomeHeld:
		return result.Reservation.ID, nil
	case inventory.OutcomeBusy:
		return uuid.Nil, errMiss
	case inventory.OutcomeAllHeld, inventory.OutcomeSoldOut:
		return uuid.Nil, errEmpty
	}
	return uuid.Nil, fmt.Errorf("a fresh buyer's claim was answered with outcome %d", result.Outcome)
}

// confirm pays for a reservation.
func (e *engine) confirm(ctx context.Context, reservation uuid.UUID) error {
	settled, err := e.pay.Ask(ctx, inventory.Payment{Reservation: reservation, ID: "payment-" + reservation.String()})
	if err == nil && settled.Err == nil && settled.Reservation.State != inventory.Confirmed {
		err = fmt.Errorf("the payment of a live hold was answered with %s", settled.Reservation.State)
	}
	return errors.Join(err, settled.Err)
}

// giveBack ends a hold without a sale.
func (e *engine) giveBack(ctx context.Context, reservation uuid.UUID) error {
	released, err := e.releases.Ask(ctx, reservation)
	return errors.Join(err, released.Err)
}

// sweep takes about limit lapsed holds back, and says how many it did, and how long the sweeper waits until it looks again.
func (e *engine) sweep(ctx context.Context, sweeper, limit int, interval time.Duration) (n int, wait time.Duration, err error) {
	n, err = e.store.Sweep(ctx, e.sale, fmt.Sprintf("%s/sweeper/%d", e.name, sweeper), limit)
	if err != nil || n > 0 {
		return n, 0, err
	}
	snap, err := e.store.Announce(ctx, e.sale)
	if err != nil {
		return 0, 0, err
	}
	return 0, snap.UntilLapse(interval), nil
}

// newSale registers a sale that is open, and loads its units.
func newSale(ctx context.Context, store *inventory.Store, units int64) (uuid.UUID, error) {
	sale := inventory.Sale{ID: uuid.New(), Name: "bench/sale", SKU: "sku", Units: units, MaxPerBuyer: inventory.MaxQuantity,
		StartsAt: time.Now().Add(-time.Minute), HoldTTL: time.Hour, Generation: 1}
	if err := store.Register(ctx, sale); err != nil {
		return sale.ID, err
	}
	_, err := store.Load(ctx, sale.ID, nil)
	return sale.ID, err
}

// sell sells units in reservations as large as can be, so that a sale that has sold much is made in seconds.
func sell(ctx context.Context, store *inventory.Store, sale uuid.UUID, units int64) error {
	line := inventory.NewLine("prepare")
	for units > 0 {
		var batch []inventory.Request
		for total := int64(0); total < 4000 && units > 0; {
			k := min(units, inventory.MaxQuantity)
			batch = append(batch, inventory.Request{Buyer: fmt.Sprintf("early-%d", units), Quantity: int(k)})
			total, units = total+k, units-k
		}
		results, err := store.Claim(ctx, sale, line, batch)
		if err != nil {
			return err
		}
		var payments []inventory.Payment
		for _, r := range results {
			if r.Outcome != inventory.OutcomeHeld {
				return fmt.Errorf("preparing sold units: outcome %d", r.Outcome)
			}
			payments = append(payments, inventory.Payment{Reservation: r.Reservation.ID, ID: r.Reservation.ID.String()})
		}
		settled, err := store.Confirm(ctx, sale, "prepare", payments)
		if err != nil {
			return err
		}
		for _, s := range settled {
			if s.Err != nil {
				return s.Err
			}
		}
	}
	return nil
}

// cloneSale copies all rows of a sale, whatever tables and columns there are.
func cloneSale(ctx context.Context, db *sql.DB, from uuid.UUID) (uuid.UUID, error) {
	to := uuid.New()
	tables, err := saleColumns(ctx, db)
	if err != nil {
		return to, err
	}
	for table, columns := range tables {
		list := strings.Join(columns, ", ")
		query := fmt.Sprintf("INSERT INTO %s (sale_id, %s) SELECT ?, %s FROM %s WHERE sale_id = ?", table, list, list, table)
		if _, err := db.ExecContext(ctx, query, to[:], from[:]); err != nil {
			return to, fmt.Errorf("copying %s: %w", table, err)
		}
	}
	return to, nil
}

// saleColumns gives the product's tables that have rows of a sale, with their other columns.
func saleColumns(ctx context.Context, db *sql.DB) (map[string][]string, error) {
	rows, err := db.QueryContext(ctx, `SELECT TABLE_NAME, COLUMN_NAME FROM information_schema.COLUMNS c
		WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME LIKE 'flashsale\_%' AND COLUMN_NAME <> 'sale_id' AND EXISTS (
			SELECT 1 FROM information_schema.COLUMNS s WHERE s.TABLE_SCHEMA = c.TABLE_SCHEMA AND s.TABLE_NAME = c.TABLE_NAME AND s.COLUMN_NAME = 'sale_id')`)
	if err != nil {
		return nil, fmt.Errorf("asking for the tables: %w", err)
	}
	defer func() { _ = rows.Close() }()
	tables := map[string][]string{}
	for rows.Next() {
		var table, column string
		if err := rows.Scan(&table, &column); err != nil {
			return nil, fmt.Errorf("asking for the tables: %w", err)
		}
		tables[table] = append(tables[table], column)
	}
	return tables, rows.Err()
}

// lapseTogether makes all holds of a sale lapse after a delay, and gives the instant by this process's clock. It sets
// every column that says when a hold ends.
func lapseTogether(ctx context.Context, db *sql.DB, store *inventory.Store, sale uuid.UUID, delay time.Duration) (time.Time, error) {
	tables, err := saleColumns(ctx, db)
	if err != nil {
		return time.Time{}, err
	}
	now, err := store.Now(ctx)
	if err != nil {
		return time.Time{}, err
	}
	at, local := now.Add(delay), time.Now().Add(delay)
	for table, columns := range tables {
		for _, column := range columns {
			if column != "expires_at" && column != "lapses_at" {
				continue
			}
			query := fmt.Sprintf("UPDATE %s SET %s = ? WHERE sale_id = ? AND %s IS NOT NULL", table, column, column)
			if _, err := db.ExecContext(ctx, query, at, sale[:]); err != nil {
				return local, fmt.Errorf("making holds lapse: %w", err)
			}
		}
	}
	if time.Now().After(local) {
		return local, errors.New("making holds lapse took longer than the delay")
	}
	return local, nil
}

// audit fails for every invariant that the rows break.
func audit(ctx context.Context, store *inventory.Store, sale uuid.UUID) (*inventory.Report, error) {
	report, err := store.Audit(ctx, sale)
	if err != nil {
		return nil, err
	}
	for _, c := range report.Failed() {
		err = errors.Join(err, fmt.Errorf("AUDIT: %s is broken, %s: %v", c.ID, c.Claim, c.Breaches))
	}
	return report, err
}
