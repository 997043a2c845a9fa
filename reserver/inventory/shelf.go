package inventory

import (
	"context"
	"database/sql"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
)

// ReturnedUnitsSQL and FreshUnitsSQL are the claim's two scans. Each is served in order by the primary key it locks:
// no filesort, one record lock per unit.
const (
	ReturnedUnitsSQL = `SELECT unit_no FROM flashsale_returned
		WHERE sale_id = ? ORDER BY unit_no LIMIT ? FOR UPDATE SKIP LOCKED`
	FreshUnitsSQL = `SELECT unit_no FROM flashsale_unit
		WHERE sale_id = ? AND unit_no >= ? AND unit_no < ? AND reservation_id = 0x00000000000000000000000000000000
		ORDER BY unit_no LIMIT ? FOR UPDATE SKIP LOCKED`
)

// shelf is a line's search for available units in one transaction.
type shelf struct {
	line    *Line
	next    int64 // the line's new start, if the transaction commits
	overdue bool  // expired holds stand on the shelf, so that "short" is not the last word
}

// taken are units locked by a transaction.
type taken struct {
	returned, fresh []int64
	at              time.Time // the database's time after that
}

func (t taken) len() int     { return len(t.returned) + len(t.fresh) }
func (t taken) all() []int64 { return slices.Concat(t.returned, t.fresh) }

// take locks up to wanted available units of the sale's, which have the numbers 1..last.
func (s *shelf) take(ctx context.Context, tx *queries, sale uuid.UUID, wanted int, last int64) (t taken, err error) {
	if s.line.next == 0 {
		if err := s.findStart(ctx, tx, sale); err != nil {
			return t, err
		}
	}
	s.next = 0
	// In slices: a line that was idle for long has many taken units to walk past, and must not do it in one go.
	for i := 0; i < scans && (i == 0 || t.len() < wanted && s.next <= last); i++ {
		if err := tx.read(ctx, s.scan(sale, wanted, last, &t)...); err != nil {
			return t, fmt.Errorf("locking units: %w", err)
		}
	}
	return t, nil
}

// scan gives the statements that lock wanted units into t, of those that were returned and of one slice of the fresh ones. They
// are sent together: when returned units are found, more fresh ones are locked than are taken, and left to the next claim.
func (s *shelf) scan(sale uuid.UUID, wanted int, last int64, t *taken) (reads []read) {
	lock := func(into *[]int64, query string, args ...any) {
		reads = append(reads, read{query: query, args: args, each: func(rows *sql.Rows) error {
			var unit int64
			err := rows.Scan(&unit)
			*into = append(*into, unit)
			return err
		}})
	}
	if s.next == 0 {
		s.next = s.line.next
		lock(&t.returned, ReturnedUnitsSQL, id(sale), wanted)
	}
	if end := min(s.next+scanRows, last+1); s.next < end {
		lock(&t.fresh, FreshUnitsSQL, id(sale), s.next, end, wanted-t.len())
		reads[len(reads)-1].after = func() error {
			s.next = end
			if enough := wanted - len(t.returned); len(t.fresh) >= enough {
				if enough < len(t.fresh) {
					s.next = t.fresh[enough]
				} else if enough > 0 {
					s.next = t.fresh[enough-1] + 1
				}
				t.fresh = t.fresh[:enough]
			} else if len(t.fresh) == 0 {
				s.line.next = end // nothing is here, whatever becomes of this transaction
			}
			return nil
		}
	}
	clock := oneRow([]any{&t.at}, "SELECT UTC_TIMESTAMP(6)")
	known := clock.after
	clock.after = func() error {
		if t.len() == wanted {
			s.line.missingSince = time.Time{}
		}
		return known()
	}
	return append(reads, clock)
}

// findStart gives a new line the start of those before it. Fresh units left behind it, by a process that died, are
// found by the rescan.
func (s *shelf) findStart(ctx context.Context, tx *queries, sale uuid.UUID) error {
	err := tx.row(ctx, "SELECT COALESCE(MAX(next_unit), 1) FROM flashsale_tally WHERE sale_id = ?", id(sale)).Scan(&s.line.next)
	if err != nil {
		return fmt.Errorf("reading where fresh units begin: %w", err)
	}
	return nil
}

// commit moves the line's start, when the transaction has committed.
func (s *shelf) commit() {
	if s.next > 0 {
		s.line.next = s.next
	}
}

// leave keeps the line's start before fresh units that were found and given to nobody, because who asked wanted more.
func (s *shelf) leave(t taken, granted []*Reservation) {
	given := -len(t.returned)
	for _, r := range granted {
		given += r.Quantity
	}
	if given = max(given, 0); given < len(t.fresh) { // they are given in order
		s.next = min(s.next, t.fresh[given])
	}
}

// short gives the exact counts when fewer units were found than wanted. Units not loaded yet count as available: they are not
// there, but not sold out either.
func (s *shelf) short(ctx context.Context, tx *queries, sale uuid.UUID, found int) (Counts, error) {
	snap, err := readSnapshot(ctx, tx, sale)
	if err != nil {
		return Counts{}, err
	}
	s.overdue = !snap.NextLapse.IsZero() && !snap.NextLapse.After(snap.Now)
	s.lookBehind(snap, int64(found))
	free := snap.Counts
	free.Available += snap.Units - snap.Loaded
	return free, nil
}

// lookBehind makes the line's next claim begin at the first unit again, when units have been available for a while that
// it does not find: a rollback, or a process that died, left them behind its start. Before, they may just be locked.
func (s *shelf) lookBehind(snap *Snapshot, found int64) {
	switch {
	case s.next <= snap.Loaded+snap.removed: // there is more to look at ahead
	case snap.Available <= found:
		s.line.missingSince = time.Time{}
	case s.line.missingSince.IsZero():
		s.line.missingSince = time.Now()
	case time.Since(s.line.missingSince) > rescanAfter:
		s.next, s.line.next, s.line.missingSince = 0, 1, time.Time{}
	}
}

// give makes the reservations the owners of their units, which were taken.
func (t taken) give(sale uuid.UUID, owners []*Reservation) []change {
	owner := make(map[int64]*Reservation, t.len())
	for _, r := range owners {
		for _, u := range r.Units {
			owner[u] = r
		}
	}
	units := slices.Sorted(maps.Keys(owner))
	n := len(units)
	// ELT gives the owner in the unit's place of the list. Fresh units mostly lie side by side; else INTERVAL finds the place,
	// by bisection.
	v := newValues("UPDATE flashsale_unit FORCE INDEX (PRIMARY) SET reservation_id = ELT(")
	where := newValues("")
	if first, last := units[0], units[n-1]; last-first == int64(n-1) {
		v.text("unit_no - ").num(first - 1)
		where.text(" BETWEEN ").num(first).text(" AND ").num(last)
	} else {
		list := joinUnits(units)
		v.text("INTERVAL(unit_no,").text(list).text(")")
		where.text(" IN (").text(list).text(")")
	}
	for _, u := range units {
		v.comma().bytes(id(owner[u].ID))
	}
	v.text(") WHERE sale_id = ").bytes(id(sale)).text(" AND unit_no").text(where.String())
	changes := []change{changing(n, "giving units", v.String())}
	var back []int64
	for _, u := range t.returned {
		if owner[u] != nil {
			back = append(back, u)
		}
	}
	if len(back) > 0 {
		changes = append(changes, deleteUnits("taking returned units", "flashsale_returned", sale, back))
	}
	return changes
}

// deleteUnits deletes the rows of units from a table, each looked up.
func deleteUnits(doing, table string, sale uuid.UUID, units []int64) change {
	keys := make([][]byte, len(units))
	for i, u := range units {
		keys[i] = binary.BigEndian.AppendUint32(nil, uint32(u))
	}
	v := newValues("DELETE u FROM ").keys(keys).text(" STRAIGHT_JOIN ").text(table).text(" AS u FORCE INDEX (PRIMARY) ON u.sale_id = ").bytes(id(sale)).
		text(" AND u.unit_no = CAST(CONV(v.`key`, 16, 10) AS UNSIGNED)")
	return changing(len(units), doing, v.String())
}

// disown makes the rows of units that a reservation gave back stop naming it, for it comes to life again with others.
func disown(sale uuid.UUID, r *Reservation) change {
	return changing(anyRows, "disowning units", "UPDATE flashsale_unit FORCE INDEX (PRIMARY) SET reservation_id = 0xffffffffffffffffffffffffffffffff WHERE sale_id = ? AND reservation_id = ? AND unit_no IN ("+joinUnits(r.Units)+")",
		id(sale), id(r.ID))
}
