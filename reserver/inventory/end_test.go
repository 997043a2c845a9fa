package inventory_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// endNow moves the sale's end to this moment.
func endNow(t testing.TB, store *inventory.Store, sale *inventory.Sale) {
	t.Helper()
	sale.EndsAt, sale.Generation = time.Now().Add(-time.Second), sale.Generation+1 // not in the past, says Register
	if err := store.Register(ctx, *sale); err != nil {
		t.Fatal(err)
	}
}

// sweepAll takes lapsed holds back.
func sweepAll(t testing.TB, store *inventory.Store, sale inventory.Sale) (swept int) {
	t.Helper()
	for {
		n, err := store.Sweep(ctx, sale.ID, "sweeper", 500)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			return swept
		}
		swept += n
	}
}

// What the buyer is told, what is stored, and what is obeyed are the same, although nobody ends anything.
func TestHoldsLapseAtTheEnd(t *testing.T) {
	store := testmysql.Store(t)
	for _, tt := range []struct {
		name    string
		end     time.Duration
		ttl     time.Duration
		release bool
		atEnd   bool
	}{
		{"granted shortly before the end", 3 * time.Second, 10 * time.Minute, true, true},
		{"granted long before the end", time.Hour, 10 * time.Minute, true, false},
		{"without an end", 0, 10 * time.Minute, true, false},
		{"Drain", 3 * time.Second, 10 * time.Minute, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			sale := testmysql.Sale(2).Window(-time.Minute, tt.end).TTL(tt.ttl).Obj()
			sale.ReleaseAtEnd = tt.release
			put(t, store, sale)
			snap := wantLoaded(t, store, sale, -1, -1)
			if snap.ReleaseAtEnd != tt.release {
				t.Errorf("stored %v", snap.ReleaseAtEnd)
			}
			a, b := claimOne(t, store, sale, "a", 1).Reservation, claimOne(t, store, sale, "b", 1).Reservation
			want := a.GrantedAt.Add(tt.ttl)
			if tt.atEnd {
				want = snap.EndsAt
			}
			stored, err := store.Reservation(ctx, sale.ID, a.ID)
			if err != nil || !a.ExpiresAt.Equal(want) || !stored.ExpiresAt.Equal(want) {
				t.Errorf("told %v, stored %v, %v; want %v", a.ExpiresAt, stored.ExpiresAt, err, want)
			}
			if next := wantLoaded(t, store, sale, -1, -1).NextLapse; !next.Equal(want) {
				t.Errorf("its wave lapses at %v, want %v", next, want)
			}
			if !tt.atEnd {
				return
			}
			confirmAs(t, store, sale, a, "pay-a", inventory.Confirmed)
			testmysql.Eventually(t, "the sale ends", func() bool { return claimOne(t, store, sale, "late", 1).Outcome == inventory.OutcomeClosed })
			if r, err := store.Reservation(ctx, sale.ID, b.ID); err != nil || r.State != inventory.Expired {
				t.Errorf("the hold is %+v, %v", r, err)
			}
			if got := confirmAs(t, store, sale, b, "pay-b", inventory.RefundDue); got.Reason != inventory.DueOver {
				t.Errorf("reason %q", got.Reason)
			}
			if n := sweepAll(t, store, sale); n != 1 {
				t.Errorf("%d holds were swept", n)
			}
			if err := store.CloseSale(ctx, sale.ID); err != nil {
				t.Error(err)
			}
			wantCounts(t, store, sale, 1, 0, 1)
		})
	}
}

// The end comes earlier than the holds were told, for more of them than one transaction ends.
func TestEndHolds(t *testing.T) {
	const holds = 5000
	for _, draining := range []bool{false, true} {
		t.Run(fmt.Sprintf("draining %v", draining), func(t *testing.T) {
			store := testmysql.Store(t)
			sale := testmysql.Sale(holds).Obj()
			sale.ReleaseAtEnd = true
			put(t, store, sale)
			held := stampede(t, store, sale, 4, buyers(holds, 1))
			if err := store.EndHolds(ctx, sale.ID); !errors.Is(err, inventory.ErrNotOver) {
				t.Errorf("ending the holds of a sale that goes on: %v", err)
			}
			confirmAs(t, store, sale, held[0].Reservation, "pay-0", inventory.Confirmed)
			if _, err := testmysql.Release(store, sale.ID, held[1].Reservation.ID); err != nil {
				t.Fatal(err)
			}
			if draining {
				sale.Draining = true
				if err := store.Register(ctx, sale); err != nil {
					t.Fatal(err)
				}
			} else {
				endNow(t, store, &sale)
			}
			if n := sweepAll(t, store, sale); n != 0 {
				t.Fatalf("%d holds were swept before their time", n)
			}
			for range 2 {
				if err := store.EndHolds(ctx, sale.ID); err != nil {
					t.Fatal(err)
				}
			}
			testmysql.Audit(t, store, sale.ID)
			r, err := store.Reservation(ctx, sale.ID, held[2].Reservation.ID)
			if err != nil || r.State != inventory.Expired || !r.ExpiresAt.Before(held[2].Reservation.ExpiresAt) {
				t.Errorf("a hold that was ended is %+v, %v", r, err)
			}
			if got := confirmAs(t, store, sale, held[2].Reservation, "pay-2", inventory.RefundDue); got.Reason != inventory.DueOver {
				t.Errorf("reason %q", got.Reason)
			}
			confirmAs(t, store, sale, held[0].Reservation, "pay-0", inventory.Confirmed)
			if n := sweepAll(t, store, sale); n != holds-2 {
				t.Errorf("%d holds were swept, want %d", n, holds-2)
			}
			if err := store.CloseSale(ctx, sale.ID); err != nil {
				t.Error(err)
			}
			wantCounts(t, store, sale, holds-1, 0, 1)
			if err := store.EndHolds(ctx, sale.ID); err != nil {
				t.Errorf("ending the holds of a closed sale: %v", err)
			}
		})
	}
	t.Run("Drain", func(t *testing.T) {
		store := testmysql.Store(t)
		sale := testmysql.Sale(1).In(t, store)
		r := claimOne(t, store, sale, "a", 1).Reservation
		if err := store.EndHolds(ctx, sale.ID); !errors.Is(err, inventory.ErrNotOver) {
			t.Errorf("ending the holds of a sale that goes on: %v", err)
		}
		endNow(t, store, &sale)
		if err := store.EndHolds(ctx, sale.ID); err != nil {
			t.Fatal(err)
		}
		if stored, err := store.Reservation(ctx, sale.ID, r.ID); err != nil || !stored.ExpiresAt.Equal(r.ExpiresAt) {
			t.Errorf("the hold is %+v, %v", stored, err)
		}
		confirmAs(t, store, sale, r, "pay", inventory.Confirmed)
		if err := store.EndHolds(ctx, uuid.New()); !errors.Is(err, inventory.ErrNoSale) {
			t.Errorf("ending the holds of no sale: %v", err)
		}
	})
}

func TestEndHoldsBesideConfirmations(t *testing.T) {
	const holds = 800
	store := testmysql.Store(t)
	sale := testmysql.Sale(holds).Obj()
	sale.ReleaseAtEnd = true
	put(t, store, sale)
	held := stampede(t, store, sale, 2, buyers(holds, 1))
	endNow(t, store, &sale)
	started := make(chan struct{}, holds)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var paid, due int64
	for l := range 4 {
		wg.Go(func() {
			for i := l * 10; i < holds; i += 40 {
				payments := make([]inventory.Payment, 10)
				for p := range payments {
					payments[p] = inventory.Payment{Reservation: held[i+p].Reservation.ID, ID: fmt.Sprint("pay-", i+p)}
				}
				answers, err := store.Confirm(ctx, sale.ID, fmt.Sprint("desk-", l), payments)
				if err != nil {
					t.Error(err)
					return
				}
				started <- struct{}{}
				mu.Lock()
				for _, a := range answers {
					switch {
					case a.Err == nil && a.Reservation.State == inventory.Confirmed:
						paid++
					case a.Err == nil && a.Reservation.State == inventory.RefundDue && a.Reservation.Reason == inventory.DueOver:
						due++
					default:
						t.Errorf("%+v, %v", a.Reservation, a.Err)
					}
				}
				mu.Unlock()
			}
		})
	}
	for range 10 {
		<-started
	}
	var enders sync.WaitGroup
	for range 3 {
		enders.Go(func() {
			if err := store.EndHolds(ctx, sale.ID); err != nil {
				t.Error(err)
			}
		})
	}
	enders.Wait()
	var live int
	err := store.DB().QueryRowContext(ctx, "SELECT COUNT(*) FROM flashsale_reservation WHERE state = 1 AND expires_at > UTC_TIMESTAMP(6)").Scan(&live)
	if err != nil || live != 0 {
		t.Errorf("%d holds are live, %v", live, err)
	}
	wg.Wait()
	if paid == 0 || due == 0 || paid+due != holds {
		t.Errorf("%d were paid and %d came too late: the race did not take place", paid, due)
	}
	if n := int64(sweepAll(t, store, sale)); n != due {
		t.Errorf("%d holds were swept, want the %d", n, due)
	}
	wantCounts(t, store, sale, holds-paid, 0, paid)
	if err := store.CloseSale(ctx, sale.ID); err != nil {
		t.Error(err)
	}
}

// A hold that somebody has locked is waited for, for a second; the others lapse meanwhile.
func TestEndHoldsWhileOneIsLocked(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).Obj()
	sale.ReleaseAtEnd = true
	put(t, store, sale)
	held := stampede(t, store, sale, 1, buyers(10, 1))
	endNow(t, store, &sale)
	tx, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	scan(t, tx, "SELECT reservation_id FROM flashsale_reservation WHERE sale_id = ? AND reservation_id = ? FOR UPDATE", sale.ID[:], held[4].Reservation.ID[:])
	if err := store.EndHolds(ctx, sale.ID); !errors.Is(err, inventory.ErrBusy) {
		t.Errorf("ending a hold that is locked: %v", err)
	}
	if n := sweepAll(t, store, sale); n != 9 {
		t.Errorf("%d holds were swept, want 9", n)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := store.EndHolds(ctx, sale.ID); err != nil {
		t.Error(err)
	}
	if n := sweepAll(t, store, sale); n != 1 {
		t.Errorf("%d holds were swept, want 1", n)
	}
}

func TestSummary(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).In(t, store)
	summary := func() inventory.Summary {
		t.Helper()
		s, err := store.Summary(ctx, sale.ID)
		if err != nil {
			t.Fatal(err)
		}
		return *s
	}
	if got := summary(); got != (inventory.Summary{}) {
		t.Errorf("of a sale that nobody came to: %+v", got)
	}
	if _, err := store.Summary(ctx, uuid.New()); !errors.Is(err, inventory.ErrNoSale) {
		t.Errorf("of no sale: %v", err)
	}
	held := stampede(t, store, sale, 1, buyers(7, 1))
	second := wantLoaded(t, store, sale, -1, -1).StartsAt.Truncate(time.Second).Add(10 * time.Second)
	first := second.Add(-100 * time.Microsecond)
	for i, at := range []time.Time{first, second, second.Add(500 * time.Millisecond), second.Add(999_999 * time.Microsecond),
		second.Add(time.Second), second.Add(1400 * time.Millisecond), second.Add(20 * time.Second)} {
		if _, err := store.DB().ExecContext(ctx, "UPDATE flashsale_reservation SET granted_at = ? WHERE reservation_id = ?", at, held[i].Reservation.ID[:]); err != nil {
			t.Fatal(err)
		}
	}
	confirmAs(t, store, sale, held[0].Reservation, "pay", inventory.Confirmed)
	for i := range 3 {
		due := &inventory.Reservation{ID: uuid.New()}
		confirmAs(t, store, sale, due, fmt.Sprint("due-", i), inventory.RefundDue)
		if i == 0 {
			if _, err := store.Refund(ctx, sale.ID, due.ID, "desk", false); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := summary(); !got.FirstGrantAt.Equal(first) || got.PeakGrants != 3 || got.RefundsDue != 2 {
		t.Errorf("%+v; want the first grant at %v, 3 in a second, 2 refunds due", got, first)
	}
}

// A sale that was suspended over its start opened when it was resumed, and one that never was resumed did not open.
func TestOpenedAt(t *testing.T) {
	store := testmysql.Store(t)
	const past, future = -time.Hour, time.Hour
	for _, tt := range []struct {
		name       string
		start, end time.Duration // from now; an end of zero means none
		edits      []bool        // suspended, as registered one after the other
		want       string        // the start, now, or never
	}{
		{"not suspended", past, 0, []bool{false}, "the start"},
		{"not open yet", future, 0, []bool{false}, "never"},
		{"suspended from the beginning", past, 0, []bool{true}, "never"},
		{"suspended, and resumed after the start", past, future, []bool{true, false}, "now"},
		{"suspended, and resumed before the start", future, 0, []bool{true, false}, "never"},
		{"suspended after it opened", past, 0, []bool{false, true}, "the start"},
		{"suspended after it opened, and resumed", past, 0, []bool{false, true, false}, "the start"},
		{"resumed and suspended again", past, 0, []bool{true, false, true}, "now"},
		{"resumed after the end", 2 * past, past, []bool{true, false}, "never"},
		{"suspended after the end", 2 * past, past, []bool{false, true}, "the start"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			sale := testmysql.Sale(1).Window(tt.start, tt.end).Obj()
			sale.Suspended = tt.edits[0]
			put(t, store, sale)
			// It was loaded long ago.
			if _, err := store.DB().ExecContext(ctx, "UPDATE flashsale_sale SET loaded_at = starts_at WHERE sale_id = ?", sale.ID[:]); err != nil {
				t.Fatal(err)
			}
			before, err := store.Now(ctx)
			if err != nil {
				t.Fatal(err)
			}
			for _, suspended := range tt.edits[1:] {
				sale.Suspended = suspended
				sale.Generation++
				if err := store.Register(ctx, sale); err != nil {
					t.Fatal(err)
				}
			}
			snap, err := store.Snapshot(ctx, sale.ID)
			if err != nil {
				t.Fatal(err)
			}
			opened := snap.OpenedAt()
			got := "now"
			switch {
			case opened.IsZero():
				got = "never"
			case opened.Equal(snap.StartsAt):
				got = "the start"
			case opened.Before(before) || opened.After(snap.Now):
				got = opened.String()
			}
			if got != tt.want {
				t.Errorf("opened %s, want %s; %+v", got, tt.want, snap)
			}
		})
	}
}
