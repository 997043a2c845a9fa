package inventory

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
)

// WavesSQL finds holds that may have lapsed, in the order of the key it locks.
const WavesSQL = `SELECT lapses_at, wave_id, reservation_ids FROM flashsale_wave
	WHERE sale_id = ? AND lapses_at <= UTC_TIMESTAMP(6) ORDER BY lapses_at, wave_id LIMIT 16 FOR UPDATE SKIP LOCKED`

// LiveWavesSQL finds the others.
const LiveWavesSQL = `SELECT lapses_at, wave_id, reservation_ids FROM flashsale_wave
	WHERE sale_id = ? AND lapses_at > ? ORDER BY lapses_at, wave_id LIMIT 16 FOR UPDATE SKIP LOCKED`

// sweepUnits is how many units one transaction gives back, or those of one wave.
const sweepUnits = 10_000

// endBatch is how many holds one transaction of EndHolds ends, about.
const endBatch = 4_000

// wave is a row of flashsale_wave.
type wave struct {
	lapsesAt time.Time
	id       []byte
	ids      []uuid.UUID
}

// Sweep gives back expired holds in one transaction: those of the oldest waves, about limit of them, fewer when they have
// many units. It says how many it did: when it was not 0, there may be more. Any number of sweepers may run; a hold that
// is being confirmed is left for the next time.
func (s *Store) Sweep(ctx context.Context, sale uuid.UUID, line string, limit int) (int, error) {
	for {
		var expired []*Reservation
		var dropped int
		err := s.settle(ctx, "sweep", func(tx *queries) (err error) {
			expired, dropped, err = sweep(ctx, tx, sale, line, limit)
			return err
		})
		// Waves whose holds were all paid give nothing back, and are no reason to stop.
		if err != nil || len(expired) > 0 || dropped == 0 {
			return len(expired), err
		}
	}
}

func sweep(ctx context.Context, tx *queries, sale uuid.UUID, line string, limit int) (expired []*Reservation, dropped int, err error) {
	waves, err := takeWaves(ctx, tx, limit, WavesSQL, id(sale))
	if err != nil || len(waves) == 0 {
		return nil, 0, err
	}
	expired, left, err := lockLapsed(ctx, tx, sale, waves)
	if err != nil {
		return nil, 0, err
	}
	changes, dropped := dropWaves(sale, waves, left)
	if len(expired) > 0 {
		v := newValues("UPDATE flashsale_reservation FORCE INDEX (PRIMARY) SET state = 4, changed_at = UTC_TIMESTAMP(6) WHERE sale_id = ").
			bytes(id(sale)).text(" AND state = 1 AND expires_at <= UTC_TIMESTAMP(6) AND reservation_id IN (")
		for i, r := range expired {
			v.next(i).bytes(id(r.ID))
		}
		changes = append(changes, changing(len(expired), "ending holds", v.text(")").String()), writeEvents(sale, eventExpired, expired))
		changes = append(changes, giveBack(sale, line, Held, expired)...)
	}
	return expired, dropped, tx.change(ctx, changes...)
}

// takeWaves locks the first waves of a query, until they have limit holds.
func takeWaves(ctx context.Context, tx *queries, limit int, query string, args ...any) ([]wave, error) {
	var waves []wave
	holds := 0
	err := tx.each(ctx, func(rows *sql.Rows) error {
		var w wave
		var ids []byte
		if err := rows.Scan(&w.lapsesAt, &w.id, &ids); err != nil {
			return err
		}
		if holds < limit {
			w.ids = splitIDs(ids)
			holds += len(w.ids)
			waves = append(waves, w)
		}
		return nil
	}, query, args...)
	if err != nil {
		return nil, fmt.Errorf("finding waves of holds: %w", err)
	}
	return waves, nil
}

// lockLapsed locks the holds of the waves that are live still; left are those it could not.
func lockLapsed(ctx context.Context, tx *queries, sale uuid.UUID, waves []wave) (lapsed []*Reservation, left map[uuid.UUID]bool, err error) {
	v, n := newValues(" FROM flashsale_reservation FORCE INDEX (PRIMARY) WHERE sale_id = ").bytes(id(sale)).text(" AND state = 1 AND reservation_id IN ("), 0
	for _, w := range waves {
		for _, rid := range w.ids {
			v.next(n).bytes(id(rid))
			n++
		}
	}
	where := v.text(")").String()
	locked := make(map[uuid.UUID]bool, n)
	left = map[uuid.UUID]bool{}
	units := 0
	err = tx.each(ctx, func(rows *sql.Rows) error {
		r := &Reservation{}
		var rid []byte
		var list string
		if err := rows.Scan(&rid, &r.Quantity, &list); err != nil {
			return err
		}
		r.ID = uuid.UUID(rid)
		if units += r.Quantity; units > sweepUnits && len(lapsed) > 0 {
			return nil
		}
		locked[r.ID] = true
		lapsed = append(lapsed, r)
		var err error
		r.Units, err = splitUnits(list)
		return err
	}, "SELECT reservation_id, quantity, unit_nos"+where+" ORDER BY reservation_id FOR UPDATE SKIP LOCKED")
	if err == nil && len(lapsed) < n { // some ended before; some may be locked
		err = tx.each(ctx, func(rows *sql.Rows) error {
			var rid []byte
			if err := rows.Scan(&rid); err != nil {
				return err
			}
			if !locked[uuid.UUID(rid)] {
				left[uuid.UUID(rid)] = true
			}
			return nil
		}, "SELECT reservation_id"+where)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("locking lapsed holds: %w", err)
	}
	return lapsed, left, nil
}

// writeWave records holds that lapse together.
func writeWave(sale uuid.UUID, lapsesAt time.Time, holds []*Reservation) change {
	v := newValues("INSERT INTO flashsale_wave (sale_id, lapses_at, wave_id, reservation_ids) VALUES (").
		bytes(id(sale)).comma().time(lapsesAt).comma().bytes(id(uuid.Must(uuid.NewV7()))).comma().bytes(joinIDs(holds)).text(")")
	return changing(1, "recording when holds lapse", v.String())
}

// dropWaves deletes waves, but keeps what is left of them; it says how many it deletes.
func dropWaves(sale uuid.UUID, waves []wave, left map[uuid.UUID]bool) (changes []change, dropped int) {
	for _, w := range waves {
		var rest []byte
		for _, rid := range w.ids {
			if left[rid] {
				rest = append(rest, rid[:]...)
			}
		}
		if len(rest) > 0 {
			changes = append(changes, changing(anyRows, "shortening a wave", "UPDATE flashsale_wave SET reservation_ids = ? WHERE sale_id = ? AND lapses_at = ? AND wave_id = ?", rest, id(sale), w.lapsesAt, w.id))
		} else {
			changes = append(changes, changing(1, "ending a wave", "DELETE FROM flashsale_wave WHERE sale_id = ? AND lapses_at = ? AND wave_id = ?", id(sale), w.lapsesAt, w.id))
			dropped++
		}
	}
	return changes, dropped
}

// EndHolds makes the live holds of a sale that is over, or draining, lapse now, if the sale's holds end with it: the end came
// earlier than they were told. Sweeps give them back as any others. A confirmation in flight wins, or finds that its hold has lapsed.
// A sale that goes on is ErrNotOver. ErrBusy means that holds stayed locked by others for too long: ask again.
func (s *Store) EndHolds(ctx context.Context, sale uuid.UUID) error {
	giveUp := time.Now().Add(claimPatience)
	for rounds := 1; ; rounds++ {
		var progress, left bool
		err := s.settle(ctx, "end holds", func(tx *queries) (err error) {
			progress, left, err = endHolds(ctx, tx, sale)
			return err
		})
		switch {
		case err != nil || !left:
			return err
		case progress:
			giveUp, rounds = time.Now().Add(claimPatience), 0
		case time.Now().After(giveUp) || !pause(ctx, min(rounds, 4)):
			return ErrBusy
		}
	}
}

// endHolds ends those of the next waves; left says that there may be others.
func endHolds(ctx context.Context, tx *queries, sale uuid.UUID) (progress, left bool, err error) {
	var window Snapshot
	var now time.Time // with the sale's row locked: nobody moves the end, and no hold is granted
	err = tx.read(ctx, windowRead(sale, &window), oneRow([]any{&now}, "SELECT UTC_TIMESTAMP(6)"))
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return false, false, ErrNoSale
	case err != nil:
		return false, false, fmt.Errorf("reading the sale: %w", err)
	case window.Gate(now) != GateClosed:
		return false, false, ErrNotOver
	case !window.ReleaseAtEnd:
		return false, false, nil
	}
	waves, err := takeWaves(ctx, tx, endBatch, LiveWavesSQL, id(sale), now)
	if err != nil {
		return false, false, err
	}
	if len(waves) == 0 { // or they are locked
		err := tx.row(ctx, "SELECT EXISTS (SELECT 1 FROM flashsale_wave WHERE sale_id = ? AND lapses_at > ?)", id(sale), now).Scan(&left)
		if err != nil {
			return false, false, fmt.Errorf("looking for waves of holds: %w", err)
		}
		return false, left, nil
	}
	holds, locked, err := lockLapsed(ctx, tx, sale, waves)
	if err != nil {
		return false, false, err
	}
	changes, dropped := dropWaves(sale, waves, locked)
	if len(holds) > 0 {
		v := newValues("UPDATE flashsale_reservation FORCE INDEX (PRIMARY) SET expires_at = ").time(now).text(" WHERE sale_id = ").
			bytes(id(sale)).text(" AND state = 1 AND expires_at > ").time(now).text(" AND reservation_id IN (")
		for i, r := range holds {
			v.next(i).bytes(id(r.ID))
		}
		changes = append(changes, changing(len(holds), "ending holds", v.text(")").String()), writeWave(sale, now, holds))
	}
	return len(holds) > 0 || dropped > 0, true, tx.change(ctx, changes...)
}
