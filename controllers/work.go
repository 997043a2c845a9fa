package controllers

import (
	"context"
	"errors"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/controllers/plan"
	"flashsale.dev/operator/reserver/inventory"
)

const (
	// workFor is how long one pass loads or purges, before it shows its progress and lets other sales have a turn.
	workFor = 2 * time.Second
	// auditFor bounds the final audit: a sale of millions of units takes minutes.
	auditFor = 15 * time.Minute
)

// work does one step in the database. It says whether to look again: not after a fault, which s.seen then holds.
func (s *scope) work(ctx context.Context) bool {
	began := time.Now()
	err := s.step(ctx)
	logger := log.FromContext(ctx).WithValues("work", s.decision.Work, "seconds", time.Since(began).Seconds())
	switch {
	case errors.Is(err, inventory.ErrNotOver): // a buyer came between the look and the close
		return true
	case err != nil:
		logger.Info("could not do the database's part", "error", err.Error())
		s.seen.Fault, s.seen.Sale = faultOf(err), nil
		s.database.doubt()
		return false
	}
	logger.Info("did the database's part", "message", s.decision.Message)
	return true
}

func (s *scope) step(ctx context.Context) error {
	id := saleID(s.sale)
	switch s.decision.Work {
	case plan.WorkRegister, plan.WorkDrain:
		ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
		defer cancel()
		return s.database.Register(ctx, s.inventorySale(s.decision.Work == plan.WorkDrain))
	case plan.WorkLoad:
		return s.inTurns(ctx, func(ctx context.Context) error {
			_, err := s.database.Load(ctx, id, nil)
			return err
		})
	case plan.WorkShrink:
		ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
		defer cancel()
		return s.database.Shrink(ctx, id, int64(s.sale.Spec.Units), s.sale.Generation)
	case plan.WorkEndHolds:
		ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
		defer cancel()
		return s.database.EndHolds(ctx, id)
	case plan.WorkSweep:
		ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
		defer cancel()
		_, err := s.database.Sweep(ctx, id, "manager", int(s.sale.Spec.Sweep.BatchSize))
		return err
	case plan.WorkClose:
		ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
		defer cancel()
		return s.database.CloseSale(ctx, id)
	case plan.WorkAudit:
		ctx, cancel := context.WithTimeout(ctx, auditFor)
		defer cancel()
		var err error
		if s.seen.Audit, err = s.database.Audit(ctx, id); err == nil {
			s.seen.Summary, err = s.database.Summary(ctx, id)
		}
		return err
	case plan.WorkPurge:
		return s.inTurns(ctx, func(ctx context.Context) error { return s.database.Purge(ctx, id) })
	}
	return nil
}

// inTurns does a pass's share of long work that stops between two transactions when its time is over, and goes on from
// there in the next pass.
func (s *scope) inTurns(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, workFor)
	defer cancel()
	if err := f(ctx); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// inventorySale is the spec as the reservation pods obey it.
func (s *scope) inventorySale(draining bool) inventory.Sale {
	spec := s.sale.Spec
	sale := inventory.Sale{
		ID:           saleID(s.sale),
		Name:         client.ObjectKeyFromObject(s.sale).String(),
		SKU:          spec.SKU,
		Units:        int64(spec.Units),
		StartsAt:     spec.StartTime.Truncate(time.Microsecond), // the precision of the database
		HoldTTL:      spec.HoldTTL.Duration,
		MaxPerBuyer:  int(spec.MaxPerBuyer),
		ReleaseAtEnd: spec.Closing == sales.ClosingRelease,
		RefuseLate:   spec.Payments.Late == sales.LateRefuse,
		Suspended:    spec.Suspend,
		Draining:     draining,
		Generation:   s.sale.Generation,
	}
	if spec.EndTime != nil {
		sale.EndsAt = spec.EndTime.Truncate(time.Microsecond)
	}
	return sale
}

// endpoint is the URL of the sale's API within the cluster.
func endpoint(sale *sales.FlashSale) string {
	return "http://" + reserverName(sale) + "." + sale.Namespace + ".svc"
}
