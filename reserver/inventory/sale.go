package inventory

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
)

const (
	loadBatch    = 10_000           // unit rows that one transaction inserts
	loadStripes  = 2                // such transactions that run side by side
	batchTimeout = 15 * time.Second // for one transaction of long work
)

// Register writes the sale's spec, unless a newer generation was written before: a manager that was paused and still
// believes it leads changes nothing. It waits for claims in flight, so that none is granted under the old spec once it
// has returned. What has happened cannot be edited away: the start of a sale that has opened stays, and an end lies at
// this moment at the earliest, and a sale that was suspended until its end was. Of units it only makes more; to make fewer, they have to be taken away, by Shrink.
func (s *Store) Register(ctx context.Context, sale Sale) error {
	return s.settle(ctx, "register", func(tx *queries) error { return register(ctx, tx, sale) })
}

func register(ctx context.Context, tx *queries, sale Sale) error {
	// The loader's tally first, as the loader does.
	_, err := tx.run(ctx, `INSERT INTO flashsale_tally (sale_id, line, available, held, sold) VALUES (?, 'load', 0, 0, 0)
		ON DUPLICATE KEY UPDATE line = line`, id(sale.ID))
	if err != nil {
		return fmt.Errorf("registering the loader's tally: %w", err)
	}
	// MySQL assigns from left to right, so generation comes last. The clock is read with the row's lock held.
	if err := lockSale(ctx, tx, sale.ID); err != nil && !errors.Is(err, ErrNoSale) {
		return err
	}
	_, err = tx.run(ctx, `INSERT INTO flashsale_sale
		(sale_id, name, sku, units, starts_at, ends_at, hold_ttl_us, max_per_buyer, highest_limit, refuse_late, release_at_end, suspended, draining, generation)
		VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)
		ON DUPLICATE KEY UPDATE
		sku = IF(generation <= VALUES(generation), VALUES(sku), sku),
		units = IF(generation <= VALUES(generation), GREATEST(units, VALUES(units)), units),
		ends_at = IF(generation > VALUES(generation), ends_at, IF(loaded_at IS NULL OR starts_at > UTC_TIMESTAMP(6), VALUES(ends_at),
			GREATEST(VALUES(ends_at), LEAST(UTC_TIMESTAMP(6), COALESCE(ends_at, UTC_TIMESTAMP(6)))))),
		starts_at = IF(generation > VALUES(generation) OR loaded_at IS NOT NULL AND starts_at <= UTC_TIMESTAMP(6) AND (opened_at IS NOT NULL OR NOT suspended),
			starts_at, VALUES(starts_at)),
		hold_ttl_us = IF(generation <= VALUES(generation), VALUES(hold_ttl_us), hold_ttl_us),
		max_per_buyer = IF(generation <= VALUES(generation), VALUES(max_per_buyer), max_per_buyer),
		highest_limit = GREATEST(highest_limit, max_per_buyer),
		refuse_late = IF(generation <= VALUES(generation), VALUES(refuse_late), refuse_late),
		release_at_end = IF(generation <= VALUES(generation), VALUES(release_at_end), release_at_end),
		opened_at = IF(generation > VALUES(generation) OR opened_at IS NOT NULL OR suspended = VALUES(suspended) OR loaded_at IS NULL OR starts_at > UTC_TIMESTAMP(6),
			opened_at, IF(NOT suspended, GREATEST(starts_at, loaded_at), IF(ends_at <= UTC_TIMESTAMP(6), NULL, UTC_TIMESTAMP(6)))),
		suspended = IF(generation > VALUES(generation) OR suspended AND ends_at <= UTC_TIMESTAMP(6), suspended, VALUES(suspended)),
		draining = draining OR VALUES(draining),
		generation = GREATEST(generation, VALUES(generation))`,
		id(sale.ID), sale.Name, sale.SKU, sale.Units, sale.StartsAt.UTC(), nullTime(sale.EndsAt), sale.HoldTTL.Microseconds(),
		sale.MaxPerBuyer, sale.MaxPerBuyer, sale.RefuseLate, sale.ReleaseAtEnd, sale.Suspended, sale.Draining, sale.Generation)
	if err != nil {
		return fmt.Errorf("registering the sale: %w", err)
	}
	return nil
}

// lockSale locks the sale's row. Claims and confirmations share it until they commit.
func lockSale(ctx context.Context, tx *queries, sale uuid.UUID) error {
	var name string
	err := tx.row(ctx, "SELECT name FROM flashsale_sale WHERE sale_id = ? FOR UPDATE", id(sale)).Scan(&name)
	if errors.Is(err, sql.ErrNoRows) {
		return ErrNoSale
	}
	if err != nil {
		return fmt.Errorf("locking the sale: %w", err)
	}
	return nil
}

// Load inserts the sale's missing unit rows in transactions of 10,000, until all are there or the context has ended, which
// it looks at between transactions. It gives how many are loaded. progress, if not nil, is called as they come. It goes on where
// any process stopped, and others may load the same sale: the unit's key keeps it from existing twice, and the count moves on
// only from where the transaction's rows begin, so that units are loaded without gaps.
func (s *Store) Load(ctx context.Context, sale uuid.UUID, progress func(loaded, units int64)) (loaded int64, err error) {
	for conflicts := 0; ; {
		before := loaded
		batch, cancel := context.WithTimeout(context.WithoutCancel(ctx), batchTimeout)
		var units, removed int64
		loaded, units, removed, err = s.loading(batch, sale)
		if err == nil && progress != nil && loaded > before {
			progress(loaded, units)
		}
		more := err == nil && loaded < units && ctx.Err() == nil
		if more {
			err = s.loadStripes(batch, sale, loaded+removed, units+removed)
		}
		cancel()
		if !more {
			if err == nil && loaded < units {
				err = ctx.Err()
			}
			return loaded, err
		}
		// After a conflict, or a commit of unknown outcome, the count tells where to go on.
		var commit *CommitError
		switch {
		case err == nil:
			conflicts = 0
		case Classify(err) != Conflict && !errors.As(err, &commit):
			return loaded, err
		default:
			if conflicts++; conflicts > 10 || !pause(ctx, conflicts) {
				return loaded, err
			}
		}
	}
}

// loading says how many units are loaded of how many, and how many were taken away, and records it when all are loaded.
func (s *Store) loading(ctx context.Context, sale uuid.UUID) (loaded, units, removed int64, err error) {
	err = s.settle(ctx, "load", func(tx *queries) error {
		err := tx.row(ctx, `SELECT t.available, s.units, s.removed FROM flashsale_sale s JOIN flashsale_tally t ON t.sale_id = s.sale_id AND t.line = 'load'
			WHERE s.sale_id = ?`, id(sale)).Scan(&loaded, &units, &removed)
		if errors.Is(err, sql.ErrNoRows) {
			return ErrNoSale
		}
		if err != nil {
			return fmt.Errorf("reading how many units are loaded: %w", err)
		}
		if loaded -= removed; loaded < units {
			return nil
		}
		return tx.change(ctx, changing(anyRows, "recording that loading ended",
			"UPDATE flashsale_sale SET loaded_at = UTC_TIMESTAMP(6) WHERE sale_id = ? AND units <= ? AND loaded_at IS NULL", id(sale), loaded))
	})
	return loaded, units, removed, err
}

// loadStripes inserts the next units in a few transactions side by side, each of which counts its units and commits after the
// one before. Their numbers go from the one after counted to last.
func (s *Store) loadStripes(ctx context.Context, sale uuid.UUID, counted, last int64) error {
	var wg sync.WaitGroup
	var failed [loadStripes]error
	committed := make(chan struct{})
	close(committed) // what comes before the first is
	for i := range loadStripes {
		first := counted + int64(i)*loadBatch + 1
		last := min(first+loadBatch-1, last)
		if first > last {
			break
		}
		before, after := committed, make(chan struct{})
		committed = after
		wg.Go(func() {
			defer close(after)
			failed[i] = s.inTx(ctx, "load", func(tx *queries) error {
				if err := tx.change(ctx, changing(int(last-first+1), "inserting unit rows", insertUnits(sale, first, last))); err != nil {
					return err
				}
				<-before
				count := changing(1, "counting unit rows", "UPDATE flashsale_tally SET available = ? WHERE sale_id = ? AND line = 'load' AND available = ?", last, id(sale), first-1)
				count.wrong = errLoadedElsewhere
				if err := tx.change(ctx, count); err != nil {
					return err
				}
				return stillWanted(ctx, tx, sale, last)
			})
		})
	}
	wg.Wait()
	return cmp.Or(failed[:]...)
}

// stillWanted fails when a unit of this number is not for sale any more. The caller has the loader's count locked, as Shrink has when
// it makes fewer.
func stillWanted(ctx context.Context, tx *queries, sale uuid.UUID, unit int64) error {
	var last int64
	err := tx.row(ctx, "SELECT units + removed FROM flashsale_sale WHERE sale_id = ?", id(sale)).Scan(&last)
	if errors.Is(err, sql.ErrNoRows) {
		return ErrNoSale
	}
	if err != nil {
		return fmt.Errorf("reading how many units are wanted: %w", err)
	}
	if unit > last {
		return errLoadedElsewhere
	}
	return nil
}

// insertUnits inserts the units first..last. The server counts them out itself, as it joins two lists of numbers: to parse
// thousands of values would take it half as long again.
func insertUnits(sale uuid.UUID, first, last int64) string {
	list := func(v *values, rows, step int64) *values {
		for i := range rows {
			if i > 0 {
				v.text(" UNION ALL ")
			}
			v.text("SELECT ").num(i * step).text(" AS n")
		}
		return v
	}
	v := newValues("INSERT INTO flashsale_unit (sale_id, unit_no) SELECT ").bytes(id(sale)).comma().num(first).text(" + hundreds.n + ones.n FROM (")
	list(v, (last-first)/100+1, 100).text(") AS hundreds STRAIGHT_JOIN (")
	list(v, 100, 1).text(") AS ones WHERE hundreds.n + ones.n <= ").num(last - first)
	return v.String()
}

const snapshotSQL = `SELECT s.name, s.sku, s.units, s.starts_at, s.ends_at, s.hold_ttl_us, s.max_per_buyer, s.refuse_late, s.release_at_end, s.suspended, s.draining,
	s.generation, s.loaded_at, s.opened_at, s.closed_at, s.announced, s.removed, UTC_TIMESTAMP(6), t.available, t.held, t.sold, t.granted, t.loaded,
	(SELECT MIN(lapses_at) FROM flashsale_wave WHERE sale_id = ?)
	FROM flashsale_sale s JOIN (
		SELECT COALESCE(SUM(available), 0) AS available, COALESCE(SUM(held), 0) AS held, COALESCE(SUM(sold), 0) AS sold, COALESCE(SUM(granted), 0) AS granted,
		COALESCE(SUM(IF(line = 'load', available, 0)), 0) AS loaded
		FROM flashsale_tally WHERE sale_id = ?) t
	WHERE s.sale_id = ?`

// Snapshot reads the sale and its counts as of one instant. The cost does not depend on the number of units.
func (s *Store) Snapshot(ctx context.Context, sale uuid.UUID) (*Snapshot, error) {
	return readSnapshot(ctx, s.queries("snapshot"), sale)
}

func readSnapshot(ctx context.Context, q *queries, sale uuid.UUID) (*Snapshot, error) {
	snap := &Snapshot{Sale: Sale{ID: sale}}
	var ends, loadedAt, openedAt, closedAt, lapse sql.NullTime
	var ttl int64
	err := q.row(ctx, snapshotSQL, id(sale), id(sale), id(sale)).Scan(&snap.Name, &snap.SKU, &snap.Units, &snap.StartsAt, &ends, &ttl,
		&snap.MaxPerBuyer, &snap.RefuseLate, &snap.ReleaseAtEnd, &snap.Suspended, &snap.Draining, &snap.Generation, &loadedAt, &openedAt, &closedAt, &snap.announced, &snap.removed,
		&snap.Now, &snap.Available, &snap.Held, &snap.Sold, &snap.Granted, &snap.Loaded, &lapse)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, ErrNoSale
	}
	if err != nil {
		return nil, fmt.Errorf("reading the sale: %w", err)
	}
	snap.EndsAt, snap.LoadedAt, snap.openedAt, snap.ClosedAt, snap.NextLapse = ends.Time, loadedAt.Time, openedAt.Time, closedAt.Time, lapse.Time
	snap.HoldTTL = time.Duration(ttl) * time.Microsecond
	snap.Loaded -= snap.removed
	if snap.Held == 0 { // a wave of holds that ended otherwise
		snap.NextLapse = time.Time{}
	}
	return snap, nil
}

// CloseSale closes the sale for good, once nothing in it can change any more: no live hold, and every unit sold or the
// window over (or the sale draining). Else it returns ErrNotOver  and changes nothing. Closing twice is not an error.
func (s *Store) CloseSale(ctx context.Context, sale uuid.UUID) error {
	return s.settle(ctx, "close", func(tx *queries) error {
		// Claims and confirmations hold this row shared until they commit: with the lock taken, the counts are final.
		if err := lockSale(ctx, tx, sale); err != nil {
			return err
		}
		snap, err := readSnapshot(ctx, tx, sale)
		if err != nil {
			return err
		}
		soldOut := snap.Loaded == snap.Units && snap.Sold == snap.Units
		if snap.Held > 0 || !soldOut && snap.Gate(snap.Now) != GateClosed {
			return ErrNotOver
		}
		_, err = tx.run(ctx, "UPDATE flashsale_sale SET closed_at = UTC_TIMESTAMP(6) WHERE sale_id = ? AND closed_at IS NULL", id(sale))
		if err != nil {
			return fmt.Errorf("closing the sale: %w", err)
		}
		return announce(ctx, tx, sale, snap.unannounced()|announcedClosed&^snap.announced)
	})
}

// SoldOutAt is when the last unit was sold; zero while any is not.
func (s *Store) SoldOutAt(ctx context.Context, sale uuid.UUID) (time.Time, error) {
	var at sql.NullTime
	err := s.queries("sold out at").row(ctx, `SELECT MAX(l.recorded_at) FROM flashsale_sale s JOIN flashsale_ledger l ON l.sale_id = s.sale_id
		AND l.due_payment_id = '' WHERE s.sale_id = ? AND s.units = (SELECT SUM(sold) FROM flashsale_tally WHERE sale_id = ?)`, id(sale), id(sale)).Scan(&at)
	if err != nil {
		return time.Time{}, fmt.Errorf("reading when the last unit was sold: %w", err)
	}
	return at.Time, nil
}

// Sales lists the sales in the database.
func (s *Store) Sales(ctx context.Context) ([]uuid.UUID, error) {
	var sales []uuid.UUID
	err := s.queries("sales").each(ctx, func(rows *sql.Rows) error {
		var key []byte
		if err := rows.Scan(&key); err != nil {
			return err
		}
		sales = append(sales, uuid.UUID(key))
		return nil
	}, "SELECT sale_id FROM flashsale_sale ORDER BY name, sale_id")
	if err != nil {
		return nil, fmt.Errorf("listing the sales: %w", err)
	}
	return sales, nil
}

// saleTables are the tables whose rows belong to one sale, in the order Purge empties them: the sale's own row last,
// so that a purge that was interrupted is found again.
var saleTables = []string{"flashsale_unit", "flashsale_returned", "flashsale_reservation", "flashsale_wave", "flashsale_key",
	"flashsale_ledger", "flashsale_outbox", "flashsale_tally", "flashsale_sale"}

// Purge deletes every row of the sale, the ledger included, in transactions of 5,000, until none is left or the context
// has ended, which it looks at between two. It can be repeated.
func (s *Store) Purge(ctx context.Context, sale uuid.UUID) error {
	for _, table := range saleTables {
		for n := int64(1); n > 0; {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			batch, cancel := context.WithTimeout(context.WithoutCancel(ctx), batchTimeout)
			r, err := s.queries("purge").run(batch, "DELETE FROM "+table+" WHERE sale_id = ? LIMIT 5000", id(sale))
			cancel()
			if err == nil {
				n, err = r.RowsAffected()
			}
			if err != nil {
				return fmt.Errorf("deleting from %s: %w", table, err)
			}
		}
	}
	return nil
}
