package inventory

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"

	"github.com/google/uuid"
)

// shrinkBatch is how many units one transaction takes away, two rows each at most. Claims wait for it.
const shrinkBatch = 5_000

// HighestFreshSQL finds where fresh units end, without a lock; LastFreshSQL locks them from there down.
const (
	HighestFreshSQL = `SELECT unit_no FROM flashsale_unit
		WHERE sale_id = ? AND unit_no <= ? AND reservation_id = 0x00000000000000000000000000000000 ORDER BY unit_no DESC LIMIT 1`
	LastFreshSQL = `SELECT unit_no FROM flashsale_unit FORCE INDEX (PRIMARY)
		WHERE sale_id = ? AND unit_no > ? AND unit_no <= ? AND reservation_id = 0x00000000000000000000000000000000
		ORDER BY unit_no DESC FOR UPDATE SKIP LOCKED`
)

// Shrink makes fewer units for sale, but not fewer than are held and sold: called again when holds have ended, it takes more. It
// deletes available unit rows, fresh ones from the highest number down and then those that came back, in transactions of a few
// thousand, until the units are as many as wanted, none is available, or the context has ended, which it looks at between
// transactions. It does nothing when a newer generation of the spec was written, or the sale is closed.
func (s *Store) Shrink(ctx context.Context, sale uuid.UUID, units, generation int64) error {
	for top := int64(math.MaxUint32); ; {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		batch, cancel := context.WithTimeout(context.WithoutCancel(ctx), batchTimeout)
		var err error
		var n shrunk
		if top, err = s.highestFresh(batch, sale, top); err == nil {
			err = s.settle(batch, "shrink", func(tx *queries) (err error) {
				n, err = shrink(batch, tx, sale, units, generation, top)
				return err
			})
		}
		cancel()
		if err != nil || n.excess == 0 || top == 0 && n.taken == 0 {
			return err
		}
		top = max(top-n.excess, 0)
	}
}

// highestFresh gives the highest number of a fresh unit up to this one, 0 when there is none. In a sale that is nearly sold
// that is a long walk, so it is not done while claims wait.
func (s *Store) highestFresh(ctx context.Context, sale uuid.UUID, upTo int64) (unit int64, err error) {
	err = s.queries("shrink").row(ctx, HighestFreshSQL, id(sale), upTo).Scan(&unit)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return 0, fmt.Errorf("looking for fresh units: %w", err)
	}
	return unit, nil
}

// shrunk is what a transaction of Shrink did: how many units it wanted to take away, and how many it took.
type shrunk struct{ excess, taken int64 }

// shrink takes away fresh units of the numbers up to top, or without one, units that came back.
func shrink(ctx context.Context, tx *queries, sale uuid.UUID, units, generation, top int64) (n shrunk, err error) {
	// The loader's tally first, as Register does. Neither adds units meanwhile, and no claim is in flight.
	var counted, before, removed, written int64
	var closed bool
	err = tx.read(ctx, oneRow([]any{&counted}, "SELECT available FROM flashsale_tally WHERE sale_id = ? AND line = 'load' FOR UPDATE", id(sale)),
		oneRow([]any{&before, &removed, &written, &closed}, "SELECT units, removed, generation, closed_at IS NOT NULL FROM flashsale_sale WHERE sale_id = ? FOR UPDATE", id(sale)))
	if errors.Is(err, sql.ErrNoRows) {
		return n, ErrNoSale
	}
	if err != nil {
		return n, fmt.Errorf("locking the sale: %w", err)
	}
	if closed || written > generation || before <= units {
		return n, nil
	}
	loaded := counted - removed
	n.excess = min(max(loaded-units, 0), shrinkBatch)
	query, args := LastFreshSQL, []any{id(sale), max(top-n.excess, 0), top}
	if top == 0 {
		query, args = ReturnedUnitsSQL, []any{id(sale), n.excess}
	}
	var taken []int64
	err = tx.each(ctx, func(rows *sql.Rows) error {
		var unit int64
		err := rows.Scan(&unit)
		taken = append(taken, unit)
		return err
	}, query, args...)
	if err != nil {
		return n, fmt.Errorf("locking units to take away: %w", err)
	}
	n.taken = int64(len(taken))
	after := max(units, loaded-n.taken)
	if after == before { // all the others are held or sold
		return n, nil
	}
	changes := []change{changing(1, "making fewer units for sale", `UPDATE flashsale_sale SET units = ?, removed = removed + ?,
		loaded_at = COALESCE(loaded_at, IF(?, UTC_TIMESTAMP(6), NULL)) WHERE sale_id = ? AND units = ? AND removed = ?`,
		after, n.taken, loaded-n.taken == after, id(sale), before, removed)}
	if n.taken > 0 {
		changes = append(changes, deleteUnits("taking units away", "flashsale_unit", sale, taken))
		if top == 0 {
			changes = append(changes, deleteUnits("taking returned units away", "flashsale_returned", sale, taken))
		}
		changes = append(changes, tally(sale, "shrink", Counts{Available: -n.taken}, 0, 0))
	}
	return n, tx.change(ctx, changes...)
}
